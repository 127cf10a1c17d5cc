//! Parses and formats sizes: `10G` in, `10 GiB` out.
//!
//! Invariant: a size is a whole number of bytes up to `MAX_BYTES`; all units are powers of
//! 1024.

/// The greatest size of a file in bytes, 8 EiB - 1: file positions are signed.
/// Beyond it: the size is refused.
const MAX_BYTES: u64 = i64::MAX as u64;

const HOW: &str = "give bytes, or a whole number with K, M, G or T, as in 512M or 10G";

/// Reads a size: digits, then nothing or one of K, M, G, T (in either case), then nothing, `B` or
/// (after a unit) `iB`.
///
/// # Errors
/// A message that says what is wrong: another form, zero, or more than 8 EiB - 1.
pub fn parse(text: &str) -> Result<u64, String> {
    match parse_with_zero(text)? {
        0 => Err("at least one byte is needed".into()),
        bytes => Ok(bytes),
    }
}

/// Bytes of a text like those of [`parse`], but 0 is allowed, as QEMU allows them for a disk.
///
/// # Errors
/// Like [`parse`].
pub fn parse_with_zero(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(format!("this is not a size ({HOW})"));
    }
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        fraction if fraction.starts_with(['.', ',']) => {
            return Err("not a whole number (take the next smaller unit: 1.5G is 1536M)".into());
        }
        _ => return Err(format!("unknown unit '{unit}' ({HOW})")),
    };
    // All are digits, so that parsing fails only on overflow.
    let bytes = number.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    match bytes {
        Some(bytes) if bytes <= MAX_BYTES => Ok(bytes),
        _ => Err("too large (no file can have 8 EiB or more)".into()),
    }
}

/// `bytes` as text: in the largest unit of which there is at least one, to one decimal place,
/// followed by the exact number if the unit is not bytes.
pub fn human(bytes: u64) -> String {
    match short(bytes) {
        about if bytes >= 1 << 10 => format!("{about} ({bytes} bytes)"),
        exact => exact,
    }
}

/// A size without the exact number, for tables.
pub fn short(bytes: u64) -> String {
    const UNITS: [(&str, u32); 6] =
        [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        let whole = bytes >> shift;
        if whole == 0 {
            continue;
        }
        let rest = bytes & ((1 << shift) - 1);
        let tenth = (u128::from(rest) * 10) >> shift;
        let about = if tenth == 0 { String::new() } else { format!(".{tenth}") };
        return format!("{whole}{about} {unit}");
    }
    if bytes == 1 { "1 byte".into() } else { format!("{bytes} bytes") }
}

/// `bytes` as [`parse_with_zero`] reads them, in the largest unit of which they are a whole number: `10G`.
#[must_use]
pub fn exact(bytes: u64) -> String {
    let unit = [(40, "T"), (30, "G"), (20, "M"), (10, "K")]
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_size_is_read_as_the_same() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1023, "1023"),
            (1536, "1536"),
            (3 << 10, "3K"),
            (10 << 30, "10G"),
            (1025 << 20, "1025M"),
            (1 << 60, "1048576T"),
            (MAX_BYTES, "9223372036854775807"),
        ] {
            assert_eq!(exact(bytes), text);
            assert_eq!(parse_with_zero(text), Ok(bytes));
        }
    }

    fn refusal(text: &str) -> String {
        parse(text).unwrap_err()
    }

    #[test]
    fn a_number_alone_is_bytes() {
        assert_eq!(parse("1"), Ok(1));
        assert_eq!(parse("1000"), Ok(1000));
        assert_eq!(parse("1000B"), Ok(1000));
        assert_eq!(parse("9223372036854775807"), Ok(MAX_BYTES));
    }

    #[test]
    fn units_are_powers_of_1024_in_either_case_with_or_without_b() {
        for (unit, bytes) in [("K", 1u64 << 10), ("M", 1 << 20), ("G", 1 << 30), ("T", 1 << 40)] {
            for end in ["", "B", "iB"] {
                let text = format!("3{unit}{end}");
                assert_eq!(parse(&text), Ok(3 * bytes), "{text}");
                assert_eq!(parse(&text.to_lowercase()), Ok(3 * bytes), "{text}");
            }
        }
    }

    #[test]
    fn zero_is_allowed_only_as_the_size_of_a_disk() {
        for text in ["0", "0G", "000"] {
            assert!(refusal(text).contains("at least one byte"), "{text}");
            assert_eq!(parse_with_zero(text), Ok(0), "{text}");
        }
    }

    #[test]
    fn a_size_beyond_the_largest_file_is_refused() {
        for text in ["9223372036854775808", "8388608T", "99999999999999999999999", "17179869184G"] {
            assert!(refusal(text).contains("too large"), "{text}");
        }
    }

    #[test]
    fn garbage_is_refused_with_the_form_to_use() {
        for text in ["", "G", "ten", "-1G", "+1", " 1G", "1 G", "1GG", "1iB", "1P", "1G\u{e9}"] {
            assert!(refusal(text).contains("as in 512M"), "{text:?}: {}", refusal(text));
        }
        assert!(refusal("1.5G").contains("1536M"));
    }

    #[test]
    fn a_size_is_shown_in_the_largest_unit_and_as_the_exact_number() {
        assert_eq!(human(0), "0 bytes");
        assert_eq!(human(1), "1 byte");
        assert_eq!(human(1023), "1023 bytes");
        assert_eq!(human(1024), "1 KiB (1024 bytes)");
        assert_eq!(human(1536), "1.5 KiB (1536 bytes)");
        assert_eq!(human(10 << 30), "10 GiB (10737418240 bytes)");
        assert_eq!(human(u64::MAX), "15.9 EiB (18446744073709551615 bytes)");
    }
}
