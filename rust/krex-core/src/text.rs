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
        let mut chunks = text.chunks(8);
        for word in &self.words {
            let mut bytes = [0; 8];
            let chunk = chunks.next().unwrap_or_default();
            bytes[..chunk.len()].copy_from_slice(chunk);
            // Relaxed: published by the release of the slot or gate that it belongs to.
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
    }

    pub fn is_empty(&self) -> bool {
        // Relaxed: see `set`.
        self.words.first().is_none_or(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// Whether it begins with `prefix`, of up to 8 bytes.
    pub fn starts_with(&self, prefix: &str) -> bool {
        debug_assert!(prefix.len() <= 8, "only the first word is looked at");
        // Relaxed: see `set`.
        let first = self.words.first().map_or(0, |word| word.load(Ordering::Relaxed));
        first.to_le_bytes().starts_with(prefix.as_bytes())
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
