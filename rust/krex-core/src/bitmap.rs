//! Which slots are in use: one bit each.

use crate::sync::{AtomicU64, Ordering};

/// One bit per slot that is not free, so that a scan touches only slots in use.
#[repr(C)]
#[derive(Debug)]
pub struct Bitmap<const WORDS: usize> {
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Default for Bitmap<WORDS> {
    fn default() -> Self {
        Self { words: std::array::from_fn(|_| AtomicU64::default()) }
    }
}

impl<const WORDS: usize> Bitmap<WORDS> {
    pub fn insert(&self, index: usize) {
        // SeqCst: the writing half of a registration's handshake with a closing gate (`sync.rs`).
        self.words[index / 64].fetch_or(1 << (index % 64), Ordering::SeqCst);
    }

    pub fn remove(&self, index: usize) {
        self.words[index / 64].fetch_and(!(1 << (index % 64)), Ordering::SeqCst);
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(position, word)| {
            // SeqCst: the reading half of the same handshake.
            let mut bits = word.load(Ordering::SeqCst);
            std::iter::from_fn(move || {
                if bits == 0 {
                    return None;
                }
                let bit = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                Some(position * 64 + bit)
            })
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_lists_what_was_inserted() {
        let bitmap = Bitmap::<2>::default();
        for index in [0, 63, 64, 127] {
            bitmap.insert(index);
        }
        bitmap.remove(63);
        assert_eq!(bitmap.iter().collect::<Vec<_>>(), [0, 64, 127]);
    }
}
