//! wip
/// wip
pub struct ShardMap;
