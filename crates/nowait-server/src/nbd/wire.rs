//! The protocol's numbers and headers, and errno as its error values.
//!
//! Invariant: a failure never has the error value 0.

pub(crate) use nowait_nbd::*;

/// The error value for a positive Linux errno; `EIO` for one the protocol has no value for
/// (NBD proto.md, "Error values"). Never 0, so a failure cannot look like a success, and never
/// `ESHUTDOWN`, which is said of a server and not of its storage: on it clients connect again.
pub(crate) fn error_number(errno: i32) -> u32 {
    match errno {
        libc::EPERM | libc::EROFS => EPERM,
        libc::ENOMEM => ENOMEM,
        libc::EINVAL => EINVAL,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ENOSPC,
        libc::EOVERFLOW => EOVERFLOW,
        libc::EOPNOTSUPP => ENOTSUP,
        _ => EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nbd_should_quota_and_file_size_errors_are_enospc_and_read_only_is_eperm() {
        let rows = [
            (1, EPERM),
            (5, EIO),
            (12, ENOMEM),
            (22, EINVAL),
            (27, ENOSPC),
            (28, ENOSPC),
            (30, EPERM),
            (75, EOVERFLOW),
            (95, ENOTSUP),
            (108, EIO),
            (122, ENOSPC),
        ];
        for (errno, wanted) in rows {
            assert_eq!(error_number(errno), wanted, "errno {errno}");
        }
    }

    #[test]
    fn every_other_errno_is_eio_and_none_is_success() {
        let known = [1, 12, 22, 27, 28, 30, 75, 95, 122];
        for errno in (-200..200).filter(|errno| !known.contains(errno)) {
            assert_eq!(error_number(errno), EIO, "errno {errno}");
        }
    }
}
