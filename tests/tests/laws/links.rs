//! Links of the Markdown pages: each leads to a file or a heading of this repository, and the site
//! has every page of docs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use comrak::nodes::{AstNode, NodeValue};
use comrak::{Anchorizer, Arena, Options, parse_document};

fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("a folder above").to_owned()
}

/// The Markdown files below a folder, but for what is built there.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        if path.is_dir() {
            if !name.starts_with('.') && name != "target" && name != "artifacts" {
                files(&path, found);
            }
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// What a page links to, and the anchors of its headings as GitHub and mdBook name them.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

impl Page {
    fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).expect("a page");
        let arena = Arena::new();
        let mut options = Options::default();
        options.extension.table = true;
        let mut page = Self::default();
        let mut anchorizer = Anchorizer::new();
        for node in parse_document(&arena, &text, &options).descendants() {
            match &node.data.borrow().value {
                NodeValue::Link(link) | NodeValue::Image(link) => page.links.push(link.url.clone()),
                NodeValue::Heading(_) => {
                    let anchor = anchorizer.anchorize(text_of(node));
                    page.anchors.insert(anchor);
                }
                _ => {}
            }
        }
        page
    }
}

fn text_of<'a>(node: &'a AstNode<'a>) -> String {
    let parts = node
        .descendants()
        .map(|node| match &node.data.borrow().value {
            NodeValue::Text(text) => text.to_string(),
            NodeValue::Code(code) => code.literal.clone(),
            _ => String::new(),
        });
    parts.collect()
}

/// `a/b/../c` is `a/c`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            component => normal.push(component),
        }
    }
    normal
}

fn pages() -> BTreeMap<PathBuf, Page> {
    let mut found = Vec::new();
    files(&root(), &mut found);
    assert!(found.len() > 20, "the pages are not found");
    let pages = found.into_iter().map(|path| {
        let page = Page::read(&path);
        (path, page)
    });
    pages.collect()
}

#[test]
fn every_link_leads_somewhere() {
    let pages = pages();
    let mut broken = Vec::new();
    for (path, page) in &pages {
        for link in &page.links {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let to = match file {
                "" => path.clone(),
                file => normal(&path.parent().expect("a folder").join(file)),
            };
            let anchored = match pages.get(&to) {
                _ if anchor.is_empty() => true,
                Some(page) => page.anchors.contains(anchor),
                None => false,
            };
            if !to.exists() || !anchored {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// mdBook renders what `SUMMARY.md` lists, and a link out of `docs` has nothing to lead to on the
/// site.
#[test]
fn the_site_has_every_page_of_docs() {
    let docs = root().join("docs");
    let pages = pages();
    let summary = &pages[&docs.join("SUMMARY.md")];
    let listed: BTreeSet<_> = summary.links.iter().map(|link| docs.join(link)).collect();
    for (path, page) in pages.range(docs.clone()..) {
        if !path.starts_with(&docs) {
            break;
        }
        let is_listed = listed.contains(path) || path.ends_with("SUMMARY.md");
        assert!(is_listed, "SUMMARY.md does not list {}", path.display());
        for link in page.links.iter().filter(|link| !link.contains("://")) {
            let to = normal(&path.parent().expect("a folder").join(link));
            let inside = to.starts_with(&docs);
            assert!(inside, "{} links out of docs: {link}", path.display());
        }
    }
}
