//! A value for each device of an engine, by the device's index: the part of a mechanism's state that is
//! of one device.
//!
//! Invariant: a device whose value was never changed, or was taken, has the default one. So a device that
//! gets the index of a detached one begins without its state.

/// Values by the indices of devices, which the engine's table gives out from 0 on.
pub(crate) struct PerDevice<T>(Vec<T>);

impl<T: Default> PerDevice<T> {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// The value of a device; `None` stands for the default one.
    #[inline]
    pub(crate) fn get(&self, device: u32) -> Option<&T> {
        self.0.get(device as usize)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, device: u32) -> &mut T {
        let index = device as usize;
        if index >= self.0.len() {
            self.0.resize_with(index + 1, T::default);
        }
        &mut self.0[index]
    }

    /// Takes the value of a device that is detached.
    pub(crate) fn take(&mut self, device: u32) -> T {
        self.0.get_mut(device as usize).map(std::mem::take).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_begins_with_the_default_value_also_where_another_one_was() {
        let mut values = PerDevice::new();
        *values.get_mut(2) = 7;
        assert_eq!((values.get(1), values.get(2), values.get(3)), (Some(&0), Some(&7), None));
        assert_eq!((values.take(2), values.take(9)), (7, 0));
        assert_eq!((*values.get_mut(2), *values.get_mut(9)), (0, 0));
    }
}
