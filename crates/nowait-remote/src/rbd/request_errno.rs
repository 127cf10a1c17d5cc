//! The errnos of librbd as those of requests.
//!
//! Invariant: a request fails with an errno of the table below, or with `EIO`. Those of the library have
//! other meanings for clients: on `ESHUTDOWN`, by which it says that a cluster takes nothing more from
//! this one, an NBD client connects again for ever; on `EAGAIN` an engine asks again.

/// The errno of a request that has failed with `errno` of librbd.
pub(super) const fn request_errno(errno: i32) -> i32 {
    match errno {
        libc::EPERM
        | libc::ENOMEM
        | libc::EACCES
        | libc::EINVAL
        | libc::ENOSPC
        | libc::EROFS
        | libc::EOPNOTSUPP
        | libc::ETIMEDOUT
        | libc::EDQUOT => errno,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_that_is_not_in_the_table_is_eio() {
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EROFS, libc::ETIMEDOUT, libc::EOPNOTSUPP] {
            assert_eq!(request_errno(errno), errno);
        }
        // EBLOCKLISTED of Ceph is the number of ESHUTDOWN.
        for errno in
            [libc::ESHUTDOWN, libc::EAGAIN, libc::EINTR, libc::ENOENT, 0, -5, 4000, i32::MIN]
        {
            assert_eq!(request_errno(errno), libc::EIO, "{errno}");
        }
    }
}
