//! PyTorch and DeepSpeed, as a child process that does one step when told to and says how long it
//! took.

use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    rc::Rc,
};

use super::Contender;

struct Peer {
    child: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    fn answer(&mut self) -> Option<String> {
        self.answers.next().and_then(Result::ok)
    }

    fn step(&mut self, name: &str) -> f64 {
        writeln!(self.commands, "{name}").expect("the child listens");
        let answer = self.answer().expect("the child answers");
        answer.parse().expect("seconds")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Those that the Python of `HOST_ADAMW_PYTHON` can import, which it says in its first line; the
/// others are printed.
pub fn contenders(elements: usize) -> Vec<(String, Contender)> {
    let Ok(python) = std::env::var("HOST_ADAMW_PYTHON") else {
        println!("HOST_ADAMW_PYTHON is not set: no PyTorch, no DeepSpeed");
        return Vec::new();
    };
    let mut child = Command::new(python)
        .args(["-u", "-c", include_str!("peers.py"), &elements.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("HOST_ADAMW_PYTHON is a Python");
    let commands = child.stdin.take().expect("piped");
    let answers = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut peer = Peer {
        child,
        commands,
        answers,
    };
    let names = peer.answer().unwrap_or_default();
    let peer = Rc::new(RefCell::new(peer));
    let contender = |name: &str| -> (String, Contender) {
        let (peer, command) = (peer.clone(), name.to_owned());
        (
            name.replace('_', " "),
            Box::new(move || peer.borrow_mut().step(&command)),
        )
    };
    names.split_whitespace().map(contender).collect()
}
