//! Graphs, and the captures that make them.

use std::sync::Arc;

use crate::stream::{Action, Mark};

#[derive(Clone, Debug)]
pub struct Node {
    /// `None`: an empty node.
    pub action: Option<Action>,
    pub kind: u32,
    pub needs: Vec<usize>,
}

/// `CU_GRAPH_NODE_TYPE_*`.
pub const KERNEL: u32 = 0;
pub const MEMCPY: u32 = 1;
pub const MEMSET: u32 = 2;
pub const HOST: u32 = 3;
pub const EMPTY: u32 = 5;
pub const MEM_ALLOC: u32 = 10;
pub const MEM_FREE: u32 = 11;

/// Nodes in an order that respects their dependencies.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
}

impl Graph {
    /// The nodes on which no other depends.
    pub fn leaves(&self) -> Vec<usize> {
        let is_needed = |index| self.nodes.iter().any(|it| it.needs.contains(&index));
        (0..self.nodes.len()).filter(|&it| !is_needed(it)).collect()
    }
}

#[derive(Clone, Debug)]
pub struct Executable {
    pub graph: Graph,
    pub context: usize,
    /// The end of its last launch, for which the next one waits.
    pub last: Option<Arc<Mark>>,
}

/// `CUstreamCaptureMode`; between the two is the thread-local one.
pub const GLOBAL: u32 = 0;
pub const RELAXED: u32 = 2;

#[derive(Debug)]
pub struct Capture {
    pub context: usize,
    /// The stream on which it began.
    pub origin: usize,
    pub mode: u32,
    pub thread: u32,
    pub is_invalid: bool,
    pub graph: Graph,
    /// The graph to which the captured nodes are added at the end; `None`: a new one.
    pub target: Option<usize>,
}
