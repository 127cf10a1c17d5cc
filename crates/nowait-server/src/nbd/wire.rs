//! The protocol's numbers and headers, and errno as its error values.
//!
//! Invariant: a failure never has the error value 0.

pub(crate) use nowait_nbd::*;

/// Error numbers of Linux, as in errno(3) on the architectures that share asm-generic/errno.h
/// (x86, ARM, RISC-V, POWER and others).
mod linux {
    pub(crate) const EPERM: i32 = 1;
    pub(crate) const ENOMEM: i32 = 12;
    pub(crate) const EINVAL: i32 = 22;
    pub(crate) const EFBIG: i32 = 27;
    pub(crate) const ENOSPC: i32 = 28;
    pub(crate) const EROFS: i32 = 30;
    pub(crate) const EOVERFLOW: i32 = 75;
    /// The same number as `ENOTSUP`.
    pub(crate) const EOPNOTSUPP: i32 = 95;
    pub(crate) const ESHUTDOWN: i32 = 108;
    pub(crate) const EDQUOT: i32 = 122;
}

/// The error value for a positive Linux errno; `EIO` for one the protocol has no value for
/// (NBD proto.md, "Error values"). Never 0, so a failure cannot look like a success.
pub(crate) fn error_number(errno: i32) -> u32 {
    match errno {
        linux::EPERM | linux::EROFS => EPERM,
        linux::ENOMEM => ENOMEM,
        linux::EINVAL => EINVAL,
        linux::ENOSPC | linux::EDQUOT | linux::EFBIG => ENOSPC,
        linux::EOVERFLOW => EOVERFLOW,
        linux::EOPNOTSUPP => ENOTSUP,
        linux::ESHUTDOWN => ESHUTDOWN,
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
            (108, ESHUTDOWN),
            (122, ENOSPC),
        ];
        for (errno, wanted) in rows {
            assert_eq!(error_number(errno), wanted, "errno {errno}");
        }
    }

    #[test]
    fn every_other_errno_is_eio_and_none_is_success() {
        let known = [1, 12, 22, 27, 28, 30, 75, 95, 108, 122];
        for errno in (-200..200).filter(|errno| !known.contains(errno)) {
            assert_eq!(error_number(errno), EIO, "errno {errno}");
        }
    }
}
