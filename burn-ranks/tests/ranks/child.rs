//! This test binary as a process that does nothing but one ignored test.

use std::env;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

const CHILD: &str = "BURN_RANKS_TEST_CHILD";

/// Whether this process is such a child. By themselves these tests do nothing.
pub fn is_child() -> bool {
    env::var_os(CHILD).is_some()
}

/// The status and the standard error of the child that runs `test`, which must end before `bound`.
pub fn ended(test: &str, bound: Duration) -> (Option<i32>, String) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Read while the child runs: one that fills the pipe would wait for ever.
    let mut stderr = child.stderr.take().unwrap();
    let text = thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > bound {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{test} does not end");
        }
        sleep(Duration::from_millis(20));
    };
    (status.code(), text.join().unwrap())
}
