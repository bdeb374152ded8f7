//! Tests of ranks that are processes: each starts its program again under the launcher, as many
//! times as it has ranks, with the name of what they run.
//!
//! `MPIRUN` names the launcher, `mpirun` by default. An argument selects tests by a part of their
//! name.

use std::{
    env,
    io::Read,
    panic,
    process::{self, Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Names the program that a started process runs.
pub const PROGRAM: &str = "BURN_RANKS_TEST_PROGRAM";

/// A test with its name.
pub type Test = (&'static str, fn());

/// The `main` of a test program: runs `program` in a process that a test has started, otherwise the
/// selected tests.
pub fn main(tests: &[Test], program: impl FnOnce(&str)) {
    if let Ok(name) = env::var(PROGRAM) {
        return program(&name);
    }
    let arguments = env::args().skip(1);
    let filter = arguments.into_iter().find(|it| !it.starts_with('-'));
    let filter = filter.unwrap_or_default();
    let mut failed = Vec::new();
    for (name, test) in tests.iter().filter(|(name, _)| name.contains(&filter)) {
        let start = Instant::now();
        let result = panic::catch_unwind(test);
        let text = if result.is_ok() { "ok" } else { "FAILED" };
        let seconds = start.elapsed().as_secs_f32();
        println!("test {name} ... {text} ({seconds:.1} s)");
        if result.is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Longest that any job may take: a job that hangs is killed and fails its test.
const LONGEST: Duration = Duration::from_secs(60);

/// How a job ended.
pub struct Ended {
    pub success: bool,
    /// Both streams of all ranks.
    pub output: String,
    pub took: Duration,
}

/// Runs a program of `ranks` processes to its end.
pub fn run(ranks: usize, program: &str) -> Ended {
    run_after(ranks, program, "", LONGEST)
}

/// Runs a program of `ranks` processes, each started by a shell that runs `commands` first, such as
/// `ulimit`; at most so long.
pub fn run_after(ranks: usize, program: &str, commands: &str, longest: Duration) -> Ended {
    let start = Instant::now();
    let launcher = env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    let mut command = Command::new(&launcher);
    if !launcher.contains("mpich") {
        command.args(["--allow-run-as-root", "--oversubscribe"]);
    }
    let mut job = command
        .args(["-n", &ranks.to_string(), "sh", "-c"])
        .arg(format!("{commands}\nexec \"$0\""))
        .arg(env::current_exe().expect("this program has a path"))
        .env(PROGRAM, program)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{launcher}: {error}; Debian: apt-get install openmpi-bin"));
    let readers = [reader(job.stdout.take()), reader(job.stderr.take())];
    let success = wait(&mut job, longest);
    let took = start.elapsed();
    let output: String = readers
        .into_iter()
        .map(|reader| reader.join().expect("it only reads"))
        .collect();
    let Some(success) = success else {
        panic!("{program}: {ranks} ranks hung for {took:?}:\n{output}")
    };
    Ended {
        success,
        output,
        took,
    }
}

fn reader(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(job: &mut Child, longest: Duration) -> Option<bool> {
    let start = Instant::now();
    while start.elapsed() < longest {
        if let Some(status) = job.try_wait().expect("the launcher is ours") {
            return Some(status.success());
        }
        thread::sleep(Duration::from_millis(10));
    }
    let _ = job.kill();
    let _ = job.wait();
    None
}

impl Ended {
    /// The text behind `mark` on the lines that start with it.
    pub fn marked<'a>(&'a self, mark: &'a str) -> Vec<&'a str> {
        self.output
            .lines()
            .filter_map(|line| line.strip_prefix(mark))
            .collect()
    }

    pub fn must_succeed(&self) {
        assert!(self.success, "{}", self.output);
    }

    /// The job failed, soon, and said so.
    pub fn must_fail_with(&self, text: &str, within: Duration) {
        assert!(!self.success, "a success: {}", self.output);
        assert!(
            self.output.contains(text),
            "no `{text}` in:\n{}",
            self.output
        );
        assert!(self.took < within, "took {:?}:\n{}", self.took, self.output);
    }
}

/// Sends this process a signal that ends or stops it.
pub fn signal(signal: &str) {
    let own = process::id().to_string();
    process::Command::new("kill")
        .args([signal, &own])
        .status()
        .unwrap();
    thread::sleep(Duration::from_secs(50));
}
