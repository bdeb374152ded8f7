//! Conversations are rendered, cut into tokens and trained on as transformers does (`chat.py`).

use std::fs;

use examples::finetune::chat::{ChatTemplate, Message};
use examples::finetune::options::Options;
use examples::finetune::order::Order;
use examples::finetune::report::Report;
use examples::finetune::text::{Sequence, Text};
use serde_json::{Value, json};

use crate::{Directory, assert_near, numbers, tests, turn};

fn golden() -> Value {
    let text = fs::read_to_string(tests().join("finetune/chat.json")).expect("a reference");
    serde_json::from_str(&text).expect("JSON")
}

/// A directory of the llama with one of the reference's templates.
fn directory(template: &str) -> Directory {
    let directory = Directory::new("llama");
    let model = directory.path("model");
    let template = golden()["templates"][template].clone();
    fs::write(
        model.join("chat_template.jinja"),
        template.as_str().expect("a template"),
    )
    .expect("a file");
    let settings = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": null});
    fs::write(model.join("tokenizer_config.json"), settings.to_string()).expect("a file");
    directory
}

fn options(directory: &Directory, file: &std::path::Path, more: &str) -> Options {
    let more = format!("--context 64 --steps 3 {more}");
    directory.options_on(&format!("--chat {}", file.display()), &more)
}

fn train(directory: &Directory, more: &str) -> Report {
    let options = options(directory, &tests().join("finetune/chat.jsonl"), more);
    let report = examples::finetune::run(&options);
    report
        .unwrap_or_else(|error| panic!("{more}: {error}"))
        .expect("rank 0")
}

fn conversations() -> Vec<Vec<Message>> {
    let golden = golden();
    let text = fs::read_to_string(tests().join("finetune/chat.jsonl")).expect("a file");
    let lines = text.lines().filter(|line| !line.is_empty());
    let read = lines.map(|line| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        match line.get("messages") {
            Some(messages) => messages.clone(),
            None => json!([{"role": "user", "content": line["prompt"]},
                           {"role": "assistant", "content": line["completion"]}]),
        }
    });
    let all = read.chain([golden["with_system"].clone()]);
    all.map(|messages| serde_json::from_value(messages).expect("messages"))
        .collect()
}

#[test]
fn templates_render_what_transformers_renders() {
    let golden = golden();
    for (name, rendered) in golden["rendered"].as_object().expect("templates") {
        let template = ChatTemplate::read(&directory(name).path("model")).expect("a template");
        let rendered = rendered.as_array().expect("texts");
        for (messages, expected) in conversations().iter().zip(rendered) {
            let rendered = template.render(messages).expect("a text");
            assert_eq!(*expected, rendered.text, "{name}");
            let answers = messages
                .iter()
                .filter(|message| message.role == "assistant");
            for (range, message) in rendered.answers.iter().zip(answers) {
                let answer = &rendered.text[range.clone()];
                assert!(
                    answer.trim_start().starts_with(&message.content),
                    "{name}: {answer:?}"
                );
            }
        }
    }
}

#[test]
fn an_answer_ends_with_the_token_that_ends_it() {
    let of = |name: &str| {
        let template = ChatTemplate::read(&directory(name).path("model")).expect("a template");
        let rendered = template.render(&conversations()[0]).expect("a text");
        let answers = rendered.answers.iter();
        let answers = answers.map(|answer| rendered.text[answer.clone()].to_owned());
        answers.collect::<Vec<_>>()
    };
    assert_eq!(
        of("chatml"),
        ["the fox runs<|im_end|>", "the dog sleeps<|im_end|>"]
    );
    assert_eq!(of("turns"), [" the fox runs</s>", " the dog sleeps</s>"]);
}

#[test]
fn the_loss_has_the_tokens_of_answers() {
    let directory = directory("generation");
    let options = options(&directory, &tests().join("finetune/chat.jsonl"), "");
    let text = Text::load(&options, 40).expect("a text");
    assert_eq!((text.train.len(), text.valid.len(), text.cut), (6, 1, 0));
    let expected: Vec<Sequence> = golden()["sequences"]
        .as_array()
        .expect("sequences")
        .iter()
        .map(|sequence| Sequence {
            tokens: serde_json::from_value(sequence["tokens"].clone()).expect("tokens"),
            boundaries: Vec::new(),
            counted: serde_json::from_value(sequence["counted"].clone()).expect("places"),
        })
        .collect();
    let read: Vec<_> = text.train.into_iter().chain(text.valid).collect();
    assert_eq!(read, expected);
}

/// Shorter sequences are filled up in a batch, and a mean over answers of several micro-batches and
/// ranks is over their tokens.
#[test]
fn every_update_of_conversations_is_that_of_transformers() {
    let _turn = turn();
    let golden = golden();
    for more in [
        "",
        "--batch 1 --accum 2",
        "--batch 1 --ranks 2",
        "--checkpoint block",
    ] {
        let report = train(&directory("generation"), more);
        assert_near(more, &report.losses, &numbers(&golden["losses"]), 2e-5);
        assert_near(
            more,
            &report.gradient_norms,
            &numbers(&golden["norms"]),
            2e-4,
        );
    }
}

#[test]
fn packed_conversations_do_not_read_each_other() {
    let _turn = turn();
    let directory = directory("generation");
    let file = tests().join("finetune/chat.jsonl");
    let of = |more: &str| Text::load(&options(&directory, &file, more), 40).expect("a text");
    let (apart, packed) = (of(""), of("--packing documents"));
    // 288 tokens fill four sequences of 64.
    assert_eq!((packed.train.len(), packed.valid.len()), (3, 1));
    assert_eq!(packed.train[0].boundaries, [50]);
    let counted = packed.train[0].counted.as_ref().expect("places");
    assert_eq!(
        counted[..50],
        apart.train[0].counted.as_ref().expect("places")[..]
    );
    let report = train(&directory, "--packing documents --batch 1");
    assert!(report.losses.iter().all(|loss| loss.is_finite()));
}

#[test]
fn an_update_has_sequences_of_similar_lengths() {
    let lengths: Vec<usize> = (0..200).map(|number| 1 + number * 37 % 101).collect();
    let mut order = Order::new(lengths.clone(), 4, Some(7));
    let updates: Vec<_> = (0..50).map(|update| order.update(update)).collect();
    let mut all = updates.concat();
    all.sort_unstable();
    assert_eq!(all, (0..200).collect::<Vec<_>>());
    for update in &updates {
        let of_update: Vec<_> = update.iter().map(|sequence| lengths[*sequence]).collect();
        assert!(of_update.is_sorted_by(|longer, shorter| longer >= shorter));
        assert!(of_update[0] - of_update[3] <= 4, "{of_update:?}");
    }
    let firsts: Vec<_> = updates.iter().map(|update| lengths[update[0]]).collect();
    assert!(!firsts.is_sorted() && !firsts.is_sorted_by(|longer, shorter| longer >= shorter));
    let next: Vec<_> = (50..100).map(|update| order.update(update)).collect();
    assert_ne!(next, updates);
}

#[test]
fn a_conversation_that_cannot_be_used_is_named_with_its_line() {
    let directory = directory("generation");
    let refusal = |line: &str| {
        let file = directory.path("bad.jsonl");
        let good = r#"{"prompt": "a dog", "completion": "sleeps"}"#;
        fs::write(&file, format!("{good}\n\n{line}\n")).expect("a file");
        let error = Text::load(&options(&directory, &file, ""), 40).expect_err(line);
        error.to_string()
    };
    for (line, says) in [
        ("{", "not JSON"),
        (r#"{"text": "a dog"}"#, "neither"),
        (r#"{"messages": []}"#, "no message of the role assistant"),
        (
            r#"{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "bark"}]}]}"#,
            "has tool_calls, which is not rendered",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "a dog"}]}"#,
            "no message of the role assistant",
        ),
        (
            r#"{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            "there is no tool",
        ),
    ] {
        let error = refusal(line);
        let place = error.contains("bad.jsonl: line 3: ");
        assert!(place && error.contains(says), "{error}");
    }

    // Thoughts that later turns do not have.
    let template = "{% for message in messages %}{% if loop.last and message.role == 'assistant' %}so, {% endif %}\
                    {{ message.content }}\n{% endfor %}";
    let path = directory.path("model").join("chat_template.jinja");
    fs::write(&path, template).expect("a file");
    let turn =
        r#"{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "sleeps"}"#;
    let error = refusal(&format!(r#"{{"messages": [{turn}, {turn}]}}"#));
    assert!(error.contains("line 3: message 2"), "{error}");

    fs::write(&path, "{% if %}").expect("a file");
    let error = refusal("");
    assert!(error.contains("chat_template.jinja"), "{error}");
    fs::remove_file(&path).expect("a file");
    let error = refusal("");
    assert!(error.contains("no chat template"), "{error}");
}

#[test]
fn the_template_can_be_in_the_settings_of_the_tokenizer() {
    const SOURCE: &str = "{% for message in messages %}{{ message.content }}.{% endfor %}";
    let directory = directory("generation");
    let model = directory.path("model");
    fs::remove_file(model.join("chat_template.jinja")).expect("a file");
    let named =
        json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": SOURCE}]);
    for template in [json!(SOURCE), named] {
        let settings = json!({"chat_template": template});
        fs::write(model.join("tokenizer_config.json"), settings.to_string()).expect("a file");
        let template = ChatTemplate::read(&model).expect("a template");
        let rendered = template.render(&conversations()[2][1..]).expect("a text");
        assert_eq!(rendered.text, "jumps.");
    }
}

#[test]
fn long_conversations_are_cut_and_counted() {
    let directory = directory("generation");
    let file = tests().join("finetune/chat.jsonl");
    let text = Text::load(&options(&directory, &file, "--context 30"), 40).expect("a text");
    let all = || text.train.iter().chain(&text.valid);
    assert!(all().all(|sequence| sequence.tokens.len() <= 30));
    assert_eq!(text.cut, 4);
    // That which has its answer after the thirtieth token is left out.
    assert_eq!(all().count(), 6);
}
