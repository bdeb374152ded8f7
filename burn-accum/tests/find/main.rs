//! The search for a micro-batch, on peaks that are made up. In a process of its own: a trial sees
//! the panics of all threads.

mod partition;
mod report;
mod request;
mod search;
