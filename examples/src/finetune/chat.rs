//! Conversations as sequences: rendered by the chat template of the model's directory, with the
//! loss on the answers only.

use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind};
use serde::Deserialize;
use tokenizers::Tokenizer;

use super::text::{Sequence, check_vocabulary};
use crate::training::error::TrainingError;

/// A line of the file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Conversation { messages: Vec<Message> },
    Pair { prompt: String, completion: String },
}

/// What somebody says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

/// What a line or a message says beside its texts, and templates render if they get it.
const NOT_RENDERED: [&str; 6] = [
    "tools",
    "functions",
    "tool_calls",
    "function_call",
    "reasoning_content",
    "thinking",
];

/// The first field of a line that would be lost.
fn not_rendered(line: &serde_json::Value) -> Option<&'static str> {
    let messages = line["messages"].as_array().into_iter().flatten();
    let mut all = std::iter::once(line).chain(messages);
    all.find_map(|part| {
        let is_given = |field: &&str| part.get(field).is_some_and(|value| !value.is_null());
        NOT_RENDERED.into_iter().find(is_given)
    })
}

/// Whose messages are answers.
const ASSISTANT: &str = "assistant";

impl Line {
    fn into_messages(self) -> Vec<Message> {
        match self {
            Self::Conversation { messages } => messages,
            Self::Pair { prompt, completion } => vec![
                Message {
                    role: "user".to_owned(),
                    content: prompt,
                },
                Message {
                    role: ASSISTANT.to_owned(),
                    content: completion,
                },
            ],
        }
    }
}

/// The chat template of a model.
pub struct ChatTemplate {
    environment: Environment<'static>,
    path: PathBuf,
    /// `bos_token` and the like, which templates name.
    special_tokens: Vec<(String, Value)>,
}

/// The name of the template in its environment.
const TEMPLATE: &str = "chat template";

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// All messages.
    pub text: String,
    /// The bytes of the answers, each with the token that ends it.
    pub answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or that of `tokenizer_config.json`, in a model's directory.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Text`] if there is none, or it is no template.
    pub fn read(folder: &Path) -> Result<Self, TrainingError> {
        let settings_path = folder.join("tokenizer_config.json");
        let settings: serde_json::Value = if settings_path.exists() {
            let text = fs_err::read_to_string(&settings_path)?;
            serde_json::from_str(&text).map_err(|error| refused(&settings_path, error))?
        } else {
            serde_json::Value::Null
        };
        let file = folder.join("chat_template.jinja");
        let (path, source) = if file.exists() {
            let source = fs_err::read_to_string(&file)?;
            (file, source)
        } else {
            let source = named_template(&settings["chat_template"]).ok_or_else(|| {
                let reason = "has no chat template, and there is no chat_template.jinja: take an instruct model, or write the template \
                              that prompts will have later into chat_template.jinja";
                refused(&settings_path, reason)
            })?;
            (settings_path, source.to_owned())
        };
        let special_tokens = settings.as_object().into_iter().flatten();
        let special_tokens = special_tokens.filter_map(|(name, token)| {
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            name.ends_with("_token")
                .then(|| (name.clone(), Value::from(text)))
        });
        let mut environment = environment();
        let added = environment.add_template_owned(TEMPLATE, without_generation_tags(&source));
        added.map_err(|error| refused(&path, format!("{error:#}")))?;
        Ok(Self {
            environment,
            special_tokens: special_tokens.collect(),
            path,
        })
    }

    /// Renders a conversation, and finds its answers in it: what follows the prompt for the answer,
    /// to the end of the answer's own rendering without the white space at its end.
    ///
    /// # Errors
    ///
    /// What is wrong with the conversation.
    pub fn render(&self, messages: &[Message]) -> Result<Rendered, String> {
        let text = self.text(messages, false)?;
        let is_answer = |message: &Message| message.role == ASSISTANT;
        let mut answers = Vec::new();
        for number in (0..messages.len()).filter(|number| is_answer(&messages[*number])) {
            let prompt = self.text(&messages[..number], true)?;
            let answered = self.text(&messages[..=number], false)?;
            let answered = answered.trim_end();
            if !(answered.starts_with(&prompt) && text.starts_with(answered)) {
                return Err(format!(
                    "message {} is another text in the whole conversation than at its end, by {}: the loss would be on what the model is not \
                     asked for; end the conversation there, and write later answers into lines of their own",
                    number + 1,
                    self.path.display()
                ));
            }
            answers.push(prompt.len()..answered.len());
        }
        if answers.is_empty() {
            return Err(
                "has no message of the role assistant: there is nothing to learn".to_owned(),
            );
        }
        Ok(Rendered { text, answers })
    }

    fn text(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, String> {
        let template = self.environment.get_template(TEMPLATE);
        let mut variables = self.special_tokens.clone();
        let messages = messages.iter().map(|message| {
            Value::from_pairs([("role", &*message.role), ("content", &*message.content)])
        });
        variables.push(("messages".to_owned(), messages.collect()));
        variables.push((
            "add_generation_prompt".to_owned(),
            Value::from(add_generation_prompt),
        ));
        let variables = Value::from_pairs(variables);
        let rendered = template.and_then(|template| template.render(variables));
        rendered.map_err(|error| match error.kind() {
            // The template's own words.
            ErrorKind::InvalidOperation => error.detail().map_or(error.to_string(), str::to_owned),
            _ => format!("{}: {error:#}", self.path.display()),
        })
    }
}

fn refused(path: &Path, reason: impl ToString) -> TrainingError {
    TrainingError::Text {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// A template, or of several that with the name `default`.
fn named_template(value: &serde_json::Value) -> Option<&str> {
    let templates = value.as_array().into_iter().flatten();
    let mut named = templates.filter(|template| template["name"] == "default");
    value
        .as_str()
        .or_else(|| named.next()?["template"].as_str())
}

/// Jinja as transformers sets it up.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.expect("Jinja's own marks"));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| {
        Err::<Value, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    // `json.dumps`, not Jinja's own filter, which escapes HTML.
    environment.add_filter("tojson", |value: Value, _: Kwargs| {
        let json = serde_json::to_string(&value);
        json.map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))
    });
    environment
}

/// Transformers' tags around what an assistant generates, which no other Jinja knows, as comments.
fn without_generation_tags(source: &str) -> String {
    let mut written = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|end| start + end + 2) else {
            break;
        };
        let tag = &rest[start + 2..end - 2];
        let name =
            tag.trim_matches(|sign: char| sign == '-' || sign == '+' || sign.is_whitespace());
        written.push_str(&rest[..start]);
        if ["generation", "endgeneration"].contains(&name) {
            written.push_str(&format!("{{#{tag}#}}"));
        } else {
            written.push_str(&rest[start..end]);
        }
        rest = &rest[end..];
    }
    written + rest
}

/// The conversations of a file, each a sequence.
///
/// # Errors
///
/// [`TrainingError::Io`]; [`TrainingError::Text`] with the line of a conversation that cannot be
/// used.
pub fn read_conversations(
    file: &Path,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    vocabulary: usize,
) -> Result<Vec<Sequence>, TrainingError> {
    let text = fs_err::read_to_string(file)?;
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            let read = conversation(line, template, tokenizer, vocabulary);
            read.map_err(|reason| refused(file, format!("line {}: {reason}", number + 1)))
        })
        .collect()
}

fn conversation(
    line: &str,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    vocabulary: usize,
) -> Result<Sequence, String> {
    let json: serde_json::Value =
        serde_json::from_str(line).map_err(|error| format!("is not JSON: {error}"))?;
    if let Some(field) = not_rendered(&json) {
        return Err(format!(
            "has {field}, which is not rendered: the model would be trained on an answer without it; leave such lines out"
        ));
    }
    let line: Line = serde_json::from_value(json).map_err(|_| {
        r#"is neither {"messages": [{"role": "user", "content": ".."}, ..]} nor {"prompt": "..", "completion": ".."}, whose values are text"#
            .to_owned()
    })?;
    let Rendered { text, answers } = template.render(&line.into_messages())?;
    // The template has written the special tokens.
    let encoding = tokenizer.encode(text, false);
    let encoding = encoding.map_err(|error| error.to_string())?;
    let tokens = encoding.get_ids().to_vec();
    check_vocabulary(tokenizer, &tokens, vocabulary)?;
    // As transformers has it: a token that begins before the answer too.
    let has_a_part_of = |(start, end): (usize, usize), answer: &Range<usize>| {
        start < answer.end && end > answer.start
    };
    let is_in_an_answer = |token: &(usize, usize)| {
        let mut answers = answers.iter();
        answers.any(|answer| has_a_part_of(*token, answer))
    };
    let counted = encoding.get_offsets().iter().map(is_in_an_answer);
    Ok(Sequence {
        tokens,
        boundaries: Vec::new(),
        counted: Some(counted.collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::without_generation_tags;

    #[test]
    fn tags_of_generation_are_comments_that_strip_white_space() {
        let source = "{% if x %} a {%- generation -%} b {% endgeneration %}{% endif %} {% c";
        assert_eq!(
            without_generation_tags(source),
            "{% if x %} a {#- generation -#} b {# endgeneration #}{% endif %} {% c"
        );
    }
}
