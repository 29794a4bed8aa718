//! Short texts in shared memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Up to `8 * WORDS` bytes of text, zero-padded. Another process may write while we read; the
/// worst that comes of it is a garbled name, never undefined behaviour, hence the atomics.
#[repr(C)]
#[derive(Debug)]
pub struct SharedText<const WORDS: usize> {
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> SharedText<WORDS> {
    pub const CAPACITY: usize = WORDS * 8;

    /// Stores `text`, cut to the capacity.
    pub fn set(&self, text: &[u8]) {
        let mut padded = vec![0_u8; Self::CAPACITY];
        let length = text.len().min(Self::CAPACITY);
        padded[..length].copy_from_slice(&text[..length]);
        for (word, bytes) in self.words.iter().zip(padded.chunks_exact(8)) {
            // Relaxed: published by the release of the slot or gate that it belongs to.
            word.store(u64::from_le_bytes(bytes.try_into().expect("8")), Ordering::Relaxed);
        }
    }

    /// The bytes up to the first zero.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::CAPACITY);
        for word in &self.words {
            // Relaxed: see `set`.
            bytes.extend_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
            bytes.truncate(end);
        }
        bytes
    }

    /// The text, with what is not UTF-8 (a cut character, say) replaced.
    pub fn get(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }
}
