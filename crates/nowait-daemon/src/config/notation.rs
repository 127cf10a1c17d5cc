//! Values in a file that have the notation of the command line.
//!
//! Invariant: what is written is read as the same value.

use nowait_image::{Format, formats};
use nowait_nbd::Address;
use nowait_remote::{CacheOptions, Location, MIN_BLOCK_MEMORY, MIN_CACHE_BYTES};
use nowait_server::BlockSize;
use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serializer};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use crate::config::allowed_uri::AllowedUri;
use crate::config::control_address::ControlAddress;
use crate::config::listen_address;
use crate::config::vhost_user_spec::VhostUserSpec;
use crate::size;

/// The size of a cache, unless it is given.
const CACHE_BYTES: u64 = 10 << 30;

/// A module for `#[serde(with)]` of `$ty`, `Option<$ty>` or `Vec<$ty>`, by the functions that read and write one.
macro_rules! notation {
    ($name:ident, one $ty:ty, $read:expr, $write:expr) => {
        pub(super) mod $name {
            use super::*;
            pub(in crate::config) fn serialize<S: Serializer>(
                value: &$ty,
                to: S,
            ) -> Result<S::Ok, S::Error> {
                to.serialize_str(&$write(value).map_err(S::Error::custom)?)
            }
            pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
                from: D,
            ) -> Result<$ty, D::Error> {
                $read(&String::deserialize(from)?).map_err(D::Error::custom)
            }
        }
    };
    ($name:ident, option $ty:ty, $read:expr, $write:expr) => {
        pub(super) mod $name {
            use super::*;
            pub(in crate::config) fn serialize<S: Serializer>(
                value: &Option<$ty>,
                to: S,
            ) -> Result<S::Ok, S::Error> {
                match value {
                    Some(value) => to.serialize_str(&$write(value).map_err(S::Error::custom)?),
                    None => to.serialize_none(),
                }
            }
            pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
                from: D,
            ) -> Result<Option<$ty>, D::Error> {
                $read(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
            }
        }
    };
    ($name:ident, list $ty:ty, $read:expr, $write:expr) => {
        pub(super) mod $name {
            use super::*;
            pub(in crate::config) fn serialize<S: Serializer>(
                values: &[$ty],
                to: S,
            ) -> Result<S::Ok, S::Error> {
                let texts: Result<Vec<String>, _> = values.iter().map($write).collect();
                to.collect_seq(texts.map_err(S::Error::custom)?)
            }
            pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
                from: D,
            ) -> Result<Vec<$ty>, D::Error> {
                let texts = Vec::<String>::deserialize(from)?;
                texts
                    .iter()
                    .map(|text| $read(text))
                    .collect::<Result<_, _>>()
                    .map_err(D::Error::custom)
            }
        }
    };
}

notation!(addresses, list Address, listen_address::parse, listen_address::text);
notation!(locations, list Location, |text: &String| backing(&text.into()), location);
notation!(format, option Format, parse_format, |format: &Format| Ok::<_, String>(format.name().to_owned()));
notation!(block_size, option BlockSize, parse_block_size, |size: &BlockSize| bytes(&size.bytes().into()));
notation!(cache, option CacheOptions, |text: &String| parse_cache(&text.into()), cache_text);
notation!(size_with_zero, one u64, size::parse_with_zero, bytes);
notation!(some_size, option u64, size::parse, bytes);
notation!(devices, list VhostUserSpec, |text: &String| VhostUserSpec::parse(text.into()), VhostUserSpec::text);
notation!(controls, list ControlAddress, |text: &String| ControlAddress::parse(&text.into()), ControlAddress::text);
notation!(uris, list AllowedUri, |text: &String| AllowedUri::parse(&text.into()), |uri: &AllowedUri| Ok::<_, String>(uri.text()));
notation!(memory, one u64, parse_memory, bytes);

/// A list of values, each by the text that it is displayed as and parsed from.
pub(super) mod words {
    use super::*;

    pub(in crate::config) fn serialize<S: Serializer, T: Display>(
        values: &[T],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(T::to_string))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>, T>(
        from: D,
    ) -> Result<Vec<T>, D::Error>
    where
        T: FromStr<Err: Display>,
    {
        let texts = Vec::<String>::deserialize(from)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

/// A whole number from `LEAST` to `MOST`.
pub(super) fn number<'de, D, T, const LEAST: u64, const MOST: u64>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<u64>,
{
    let number = u64::deserialize(from)?;
    let value = (LEAST..=MOST).contains(&number).then(|| T::try_from(number).ok()).flatten();
    value.ok_or_else(|| {
        D::Error::custom(match MOST {
            u64::MAX => format!("the least is {LEAST}"),
            _ => format!("it goes from {LEAST} to {MOST}"),
        })
    })
}

/// Like [`number`], where there may be none.
pub(super) fn some_number<'de, D, T, const LEAST: u64, const MOST: u64>(
    from: D,
) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<u64>,
{
    number::<D, T, LEAST, MOST>(from).map(Some)
}

fn bytes(bytes: &u64) -> Result<String, String> {
    Ok(size::exact(*bytes))
}

/// The name of a format.
///
/// # Errors
/// A message with the names.
pub fn parse_format(text: &str) -> Result<Format, String> {
    formats::by_name(text).ok_or_else(|| format!("the formats are {}", formats::names(false)))
}

/// The blocks of the frontends.
///
/// # Errors
/// A message with the possible values.
pub fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    BlockSize::of(size::parse(text)?).ok_or_else(|| "a block has 512 or 4096 bytes".into())
}

/// The URL of an image below another one.
///
/// # Errors
/// A message: it is none.
pub fn backing(text: &OsString) -> Result<Location, String> {
    match Location::parse_backing(text)? {
        Location::File(_) => Err("it is not a URL (for files: --backing-dir)".into()),
        location => Ok(location),
    }
}

fn location(location: &Location) -> Result<String, String> {
    Ok(location.to_string())
}

/// The size of the memory for blocks.
///
/// # Errors
/// A message with the least.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes < MIN_BLOCK_MEMORY => {
            Err(format!("at least {} MiB are needed", MIN_BLOCK_MEMORY >> 20))
        }
        bytes => Ok(bytes),
    }
}

/// Refuses what only objects are of use for where they are left out.
///
/// # Errors
/// The name of the feature.
pub fn built_with_objects() -> Result<(), String> {
    nowait_remote::OBJECT_STORES_DISABLED.map_or(Ok(()), |why| Err(why.into()))
}

/// A cache, as `DIR[,size=SIZE]`.
///
/// # Errors
/// A message that says what is missing.
pub fn parse_cache(text: &OsString) -> Result<CacheOptions, String> {
    built_with_objects()?;
    let (directory, size) = match text.to_str().and_then(|text| text.rsplit_once(",size=")) {
        Some((directory, size)) => (OsString::from(directory), Some(size)),
        None => (text.clone(), None),
    };
    let bytes = size.map_or(Ok(CACHE_BYTES), size::parse)?;
    if directory.is_empty() {
        return Err("the directory is missing".into());
    }
    if bytes < MIN_CACHE_BYTES {
        return Err(format!("a cache has at least {} MiB", MIN_CACHE_BYTES >> 20));
    }
    Ok(CacheOptions { directory: directory.into(), bytes })
}

fn cache_text(cache: &CacheOptions) -> Result<String, String> {
    Ok(format!("{},size={}", text_of(&cache.directory)?, size::exact(cache.bytes)))
}

/// The text of `path`.
///
/// # Errors
/// It is none.
pub fn text_of(path: &Path) -> Result<&str, String> {
    let why =
        || format!("the path {} is not UTF-8, as a file of this form has to be", path.display());
    path.to_str().ok_or_else(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_for_blocks_is_large_enough() {
        assert_eq!(parse_memory("1G"), Ok(1 << 30));
        assert_eq!(parse_memory("256M"), Ok(nowait_remote::BLOCK_MEMORY));
        for wrong in ["0", "7M", "x", ""] {
            assert!(parse_memory(wrong).is_err(), "{wrong}");
        }
    }

    #[cfg(feature = "object-stores")]
    #[test]
    fn a_cache_is_a_directory_and_a_size_that_is_large_enough() {
        let parse = |text: &str| parse_cache(&text.into());
        let cache = |directory: &str, bytes| CacheOptions { directory: directory.into(), bytes };
        assert_eq!(parse("/a,b"), Ok(cache("/a,b", 10 << 30)));
        assert_eq!(parse("/a,size=1G"), Ok(cache("/a", 1 << 30)));
        for wrong in ["", ",size=1G", "/a,size=1M", "/a,size=x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
