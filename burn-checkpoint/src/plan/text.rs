//! Plans as text: written, drawn and read.

use std::fmt::{self, Display, Formatter, Write};
use std::iter::Peekable;
use std::str::{CharIndices, FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::{Node, Plan, PlanError};

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match f.alternate() {
            true => f.write_str(&draw(self)),
            false => f.write_str(&write(self.nodes(), &mut 0)),
        }
    }
}

fn write(nodes: &[Node], next: &mut usize) -> String {
    let mut words = Vec::new();
    let mut at = 0;
    while at < nodes.len() {
        match &nodes[at] {
            Node::Scope(inner) => {
                words.push(format!("[{}]", write(inner, next)));
                at += 1;
            }
            Node::Block => {
                let run = nodes[at..].iter().take_while(|node| **node == Node::Block);
                let run = run.count();
                words.push(match run {
                    1 => next.to_string(),
                    2 => format!("{next} {}", *next + 1),
                    _ => format!("{next}-{}", *next + run - 1),
                });
                *next += run;
                at += run;
            }
        }
    }
    words.join(" ")
}

/// The numbers of the blocks, and below them a line for every level of nesting.
fn draw(plan: &Plan) -> String {
    let mut numbers = String::new();
    let mut columns = Vec::new();
    for block in 0..plan.len() {
        if block > 0 {
            numbers.push(' ');
        }
        let begin = numbers.len();
        write!(numbers, "{block}").expect("a string takes all");
        columns.push((begin, numbers.len()));
    }
    let mut rows = Vec::new();
    draw_level(plan.nodes(), 0, 0, &columns, &mut rows);

    let mut lines = vec![numbers];
    lines.extend(rows.into_iter().map(String::from_iter));
    lines.join("\n")
}

fn draw_level(
    nodes: &[Node],
    level: usize,
    mut next: usize,
    columns: &[(usize, usize)],
    rows: &mut Vec<Vec<char>>,
) {
    for node in nodes {
        let blocks = node.len();
        if let Node::Scope(inner) = node
            && blocks > 0
        {
            if rows.len() <= level {
                rows.push(Vec::new());
            }
            let (begin, end) = (columns[next].0, columns[next + blocks - 1].1);
            let row = &mut rows[level];
            row.resize(begin, ' ');
            match end - begin {
                1 => row.push('┴'),
                wide => {
                    row.push('├');
                    row.resize(begin + wide - 1, '─');
                    row.push('┤');
                }
            }
            draw_level(inner, level + 1, next, columns, rows);
        }
        next += blocks;
    }
}

impl FromStr for Plan {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let mut reader = Reader {
            text,
            rest: text.char_indices().peekable(),
            next: 0,
            open: vec![Vec::new()],
        };
        reader.read()?;
        Ok(Self::new(reader.open.remove(0)))
    }
}

struct Reader<'a> {
    text: &'a str,
    rest: Peekable<CharIndices<'a>>,
    /// Number of the next block.
    next: usize,
    /// The scopes that have begun, outermost first; the first entry is the plan itself.
    open: Vec<Vec<Node>>,
}

impl Reader<'_> {
    fn read(&mut self) -> Result<(), PlanError> {
        while let Some(&(position, found)) = self.rest.peek() {
            match found {
                '0'..='9' => self.blocks()?,
                ' ' => drop(self.rest.next()),
                '[' if self.open.len() > DEEPEST => {
                    let expected = format!("no more than {DEEPEST} scopes in each other");
                    return Err(self.refuse(position, expected));
                }
                '[' => {
                    self.rest.next();
                    self.open.push(Vec::new());
                }
                ']' if self.open.len() > 1 => {
                    self.rest.next();
                    let scope = self.open.pop().expect("more than one is open");
                    self.innermost().push(Node::Scope(scope));
                }
                _ => return Err(self.refuse(position, "a block, a range, `[` or `]`".into())),
            }
        }
        match self.open.len() {
            1 => Ok(()),
            _ => Err(self.refuse(self.text.len(), "`]`".into())),
        }
    }

    fn blocks(&mut self) -> Result<(), PlanError> {
        let (position, first) = self.number()?;
        let mut last = first;
        if self.rest.next_if(|(_, char)| *char == '-').is_some() {
            last = self.number()?.1;
        }
        if first != self.next || last < first {
            return Err(self.refuse(position, format!("block {}", self.next)));
        }
        self.next = last + 1;
        self.innermost()
            .extend(std::iter::repeat_n(Node::Block, last + 1 - first));
        Ok(())
    }

    fn number(&mut self) -> Result<(usize, usize), PlanError> {
        let position = self
            .rest
            .peek()
            .map_or(self.text.len(), |(position, _)| *position);
        let mut digits = String::new();
        while let Some((_, digit)) = self.rest.next_if(|(_, char)| char.is_ascii_digit()) {
            digits.push(digit);
        }
        match digits.parse() {
            // So many that a typing error cannot ask for more memory than there is.
            Ok(number) if number < MOST_BLOCKS => Ok((position, number)),
            _ => Err(self.refuse(position, format!("a number below {MOST_BLOCKS}"))),
        }
    }

    fn innermost(&mut self) -> &mut Vec<Node> {
        self.open
            .last_mut()
            .expect("the plan itself is never closed")
    }

    fn refuse(&self, position: usize, expected: String) -> PlanError {
        let rest = &self.text[position..];
        let end = rest.find([' ', '[', ']']).unwrap_or(rest.len());
        let end = rest.ceil_char_boundary(end.max(1));
        PlanError::Syntax {
            position,
            found: rest[..end].to_owned(),
            expected,
        }
    }
}

const MOST_BLOCKS: usize = 1_000_000;

/// A plan is walked by functions that call themselves, and so are the scopes that it opens: its depth must fit a thread's stack.
const DEEPEST: usize = 1_000;

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Plan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node() -> impl Strategy<Value = Node> {
        Just(Node::Block).prop_recursive(4, 40, 6, |inner| {
            prop::collection::vec(inner, 0..6).prop_map(Node::Scope)
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(nodes in prop::collection::vec(node(), 0..8)) {
            let plan = Plan::new(nodes);
            prop_assert_eq!(plan.to_string().parse(), Ok(plan.clone()));
            let json = serde_json::to_string(&plan).unwrap();
            prop_assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
        }

        #[test]
        fn any_text_is_a_plan_or_refused(text in "[0-9 \\[\\]é-]{0,12}") {
            if let Ok(plan) = text.parse::<Plan>() {
                prop_assert_eq!(plan.to_string().parse(), Ok(plan));
            }
        }

        #[test]
        fn a_drawing_has_a_line_for_every_level(nodes in prop::collection::vec(node(), 1..8)) {
            let plan = Plan::new(nodes);
            let drawing = format!("{plan:#}");
            let widths: Vec<_> = drawing.lines().map(|line| line.chars().count()).collect();
            prop_assert!(widths.iter().all(|width| *width <= widths.first().copied().unwrap_or(0)));
            prop_assert!(drawing.lines().count() <= 1 + plan.depth());
        }
    }

    #[test]
    fn the_named_plans() {
        assert_eq!(Plan::plain(12).to_string(), "0-11");
        assert_eq!(Plan::every_block(3).to_string(), "[0] [1] [2]");
        assert_eq!(Plan::segments(7, 3).to_string(), "[0-2] [3-5] [6]");
        assert_eq!(Plan::plain(0).to_string(), "");
    }

    #[test]
    fn numbers_of_two_digits_are_drawn_in_place() {
        let plan: Plan = "0-7 [8 9 [10] 11] [12]".parse().unwrap();
        let expected = "\
0 1 2 3 4 5 6 7 8 9 10 11 12
                ├───────┤ ├┤
                    ├┤";
        assert_eq!(format!("{plan:#}"), expected);
    }

    #[test]
    fn scopes_in_each_other_have_an_end() {
        let nested = |depth| format!("{}0{}", "[".repeat(depth), "]".repeat(depth));
        let deepest: Plan = nested(DEEPEST).parse().unwrap();
        assert_eq!((deepest.depth(), deepest.len()), (DEEPEST, 1));
        assert_eq!(deepest.to_string(), nested(DEEPEST));
        assert_eq!(format!("{deepest:#}").lines().count(), 1 + DEEPEST);
        for depth in [DEEPEST + 1, 100_000] {
            match nested(depth).parse::<Plan>() {
                Err(PlanError::Syntax { position, .. }) => assert_eq!(position, DEEPEST),
                other => panic!("{depth}: {other:?}"),
            }
            // The same by serde.
            assert!(serde_json::from_value::<Plan>(nested(depth).into()).is_err());
        }
    }

    #[test]
    fn a_wrong_text_is_refused_where_it_is_wrong() {
        for (text, position, found) in [
            ("0 2", 2, "2"),
            ("[0 1", 4, ""),
            ("0] 1", 1, "]"),
            ("0 x1 2", 2, "x1"),
            ("0-", 2, ""),
            ("[1]", 1, "1"),
            ("0-999999999999", 2, "999999999999"),
        ] {
            match text.parse::<Plan>() {
                Err(PlanError::Syntax {
                    position: at,
                    found: what,
                    ..
                }) => assert_eq!((at, &*what), (position, found), "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
