//! The house rules that a compiler does not know, checked over the whole workspace.
//!
//! Invariant: every breach is found in one run and reported with file and line; nothing is built
//! or changed. Strings and comments are blanked first, so that words in them break no rule.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

const MAX_FILE_LINES: usize = 600;
const MAX_FUNCTION_LINES: usize = 70;
/// Names that more than one file of a crate may have.
const SHARED_NAMES: [&str; 5] = ["lib.rs", "main.rs", "mod.rs", "error.rs", "tests.rs"];
/// A crate that is tests throughout.
const TESTS_ONLY: &str = "crates/nowait-testkit/";
/// Calls that end the process when they go wrong; outside tests nothing may be answered that way.
const PANICS: [&str; 6] =
    [".unwrap()", ".expect(", "panic!", "todo!", "unimplemented!", "unreachable!"];
/// Subjects that say nothing: a comment names the thread, the request or the client.
const VAGUE: [&str; 8] =
    ["whoever", "somebody", "nobody", "anybody", "everybody", "someone", "anyone", "everyone"];
/// Words that are true of one machine only: places on it, and where it gets its crates from. In two
/// parts each, so that this file does not mention them.
const LOCAL: [(&str, &str); 7] = [
    ("/wo", "rk"),
    ("/ro", "ot/"),
    ("/ho", "me/"),
    ("arti", "factory"),
    ("jf", "rog"),
    ("replace", "-with"),
    ("[regis", "tries"),
];

#[test]
fn the_tree_keeps_the_house_rules() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let mut found = Vec::new();
    let files = files_below(&workspace);
    let name = |path: &Path| path.strip_prefix(&workspace).unwrap().to_string_lossy().into_owned();
    for path in &files {
        // A file that is not text mentions nothing.
        let text = fs::read_to_string(path).unwrap_or_default();
        check_local_names(&text, &name(path), &mut found);
        if path.extension().is_some_and(|end| end == "rs") {
            check_file(&Source::new(text), &name(path), &mut found);
        }
    }
    let mut modules = 0;
    for path in files.iter().filter(|path| is_root(path)) {
        let tree = Tree::of(path);
        modules += tree.files.len();
        tree.check(name, &mut found);
        check_names(path.parent().unwrap(), &files, name, &mut found);
        check_impls(&tree, name, &mut found);
    }
    assert!(modules > 50, "looked in the wrong place: {}", workspace.display());
    assert!(found.is_empty(), "{} breaches of the house rules:\n{}", found.len(), found.join("\n"));
}

#[test]
fn each_test_that_the_threat_model_names_is_there() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sources = files_below(&workspace.join("crates")).into_iter();
    let sources: String = sources
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let model = fs::read_to_string(workspace.join("docs/threat-model.md")).unwrap();
    let names = model.split('`').filter(|name| name.matches('_').count() > 3);
    let names: Vec<&str> = names.filter(|name| name.bytes().all(is_word)).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        assert!(sources.contains(&format!("fn {name}()")), "there is no test {name}");
    }
}

/// Every file below `directory` that is kept in the repository, in order.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with(".git") || path.ends_with("target") {
            continue;
        }
        if path.is_dir() {
            files.append(&mut files_below(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Whether a crate's module tree begins in this file.
fn is_root(path: &Path) -> bool {
    let is_program = path.parent().is_some_and(|directory| directory.ends_with("src/bin"));
    is_program || path.ends_with("src/lib.rs") || path.ends_with("src/main.rs")
}

/// A file, and the same with everything blanked that is not code. Offsets are alike in all three.
struct Source {
    text: String,
    /// Without comments, strings and characters.
    code: String,
    /// Without what is compiled for tests only, either.
    shipped: String,
}

impl Source {
    fn read(path: &Path) -> Self {
        Self::new(fs::read_to_string(path).unwrap())
    }

    fn new(text: String) -> Self {
        let code = blank_words(&text);
        let shipped = blank_tests(&code);
        Self { text, code, shipped }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Where `word` stands in `code`, not as a part of a longer name.
fn occurrences<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = code.as_bytes();
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let (first, last) = (word.as_bytes()[0], word.as_bytes()[word.len() - 1]);
        let before = at > 0 && is_word(first) && is_word(bytes[at - 1]);
        let after = is_word(last) && bytes.get(at + word.len()).is_some_and(|&byte| is_word(byte));
        !before && !after
    })
}

fn blank(bytes: &mut [u8]) {
    bytes.iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
}

/// `text` with comments, strings and characters blanked.
fn blank_words(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let mut at = 0;
    while at < bytes.len() {
        match end_of_words(&bytes, at) {
            Some(end) => {
                blank(&mut bytes[at..end]);
                at = end;
            }
            None => at += 1,
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// Where the comment, string or character ends that begins at `at`, if one does.
fn end_of_words(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let find = |what: &[u8], from: usize| {
        rest[from..].windows(what.len()).position(|w| w == what).map(|n| at + from + n + what.len())
    };
    if rest.starts_with(b"//") {
        return find(b"\n", 2).map(|end| end - 1).or(Some(bytes.len()));
    }
    if rest.starts_with(b"/*") {
        return find(b"*/", 2).or(Some(bytes.len()));
    }
    let starts_word = at == 0 || !is_word(bytes[at - 1]);
    if starts_word && let Some(raw) = [&b"r"[..], b"br"].into_iter().find(|r| rest.starts_with(r)) {
        let hashes = rest[raw.len()..].iter().take_while(|&&byte| byte == b'#').count();
        let open = raw.len() + hashes;
        if rest.get(open) == Some(&b'"') {
            let close = [b"\"".as_slice(), "#".repeat(hashes).as_bytes()].concat();
            return find(&close, open + 1);
        }
    }
    match rest {
        [b'"', ..] => end_of_quoted(bytes, at, b'"'),
        [b'\'', b'\\', ..] => end_of_quoted(bytes, at, b'\''),
        // A quote and one character are a character if a quote follows, else a lifetime.
        [b'\'', ..] => {
            let width =
                rest[1..].iter().skip(1).take_while(|&&byte| byte & 0xc0 == 0x80).count() + 1;
            (rest.get(1 + width) == Some(&b'\'')).then_some(at + width + 2)
        }
        _ => None,
    }
}

fn end_of_quoted(bytes: &[u8], start: usize, quote: u8) -> Option<usize> {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    Some((at + 1).min(bytes.len()))
}

/// `code` without the items under `#[cfg(test)]`.
fn blank_tests(code: &str) -> String {
    let mut bytes = code.as_bytes().to_vec();
    for (at, attribute) in code.match_indices("#[cfg(test)]") {
        let body = at + attribute.len();
        let end = match code[body..].find(['{', ';']).map(|n| body + n) {
            Some(open) if code.as_bytes()[open] == b'{' => end_of_braces(code, open),
            Some(semicolon) => semicolon + 1,
            None => code.len(),
        };
        blank(&mut bytes[at..end]);
    }
    String::from_utf8(bytes).unwrap()
}

/// The end of the block that opens at `open`.
fn end_of_braces(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (n, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return n + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// Rules for each file by itself.
fn check_file(source: &Source, name: &str, found: &mut Vec<String>) {
    let Source { text, code, .. } = source;
    if !text.starts_with("//!") {
        found.push(format!("{name}:1: does not begin with //! and what it is for"));
    }
    let lines = text.lines().count();
    if lines > MAX_FILE_LINES {
        found.push(format!("{name}:{lines}: more than {MAX_FILE_LINES} lines hold two ideas"));
    }
    if !code.contains("#![allow(unsafe_code)]")
        && let Some(at) = occurrences(code, "unsafe").next()
    {
        let line = line_of(code, at);
        found.push(format!("{name}:{line}: unsafe in a file without #![allow(unsafe_code)]"));
    }
    for (number, line) in text.lines().enumerate() {
        let Some((_, comment)) = line.split_once("//") else { continue };
        let comment = comment.to_lowercase();
        for word in VAGUE.iter().filter(|word| occurrences(&comment, word).next().is_some()) {
            found.push(format!("{name}:{}: a comment about {word}", number + 1));
        }
    }
    for at in occurrences(code, "fn") {
        let Some(open) = code[at..].find(['{', ';']).map(|n| at + n) else { continue };
        if code.as_bytes()[open] == b'{' {
            let line = line_of(code, at);
            let lines = line_of(code, end_of_braces(code, open) - 1) - line + 1;
            if lines > MAX_FUNCTION_LINES {
                found.push(format!("{name}:{line}: a function of {lines} lines"));
            }
        }
    }
}

fn check_local_names(text: &str, name: &str, found: &mut Vec<String>) {
    for (first, second) in LOCAL {
        let word = format!("{first}{second}");
        // A path begins here, unless it goes on from a name before it.
        let begins = |&at: &usize| {
            let before = text.as_bytes()[..at].last();
            !word.starts_with('/') || !before.is_some_and(|&b| is_word(b) || b".-*~}".contains(&b))
        };
        for at in occurrences(text, &word).filter(begins) {
            found.push(format!("{name}:{}: mentions {word}", line_of(text, at)));
        }
    }
}

/// No two files of a crate's tree have one name, so that a name leads to one file.
fn check_names(
    src: &Path,
    files: &[PathBuf],
    name: impl Fn(&Path) -> String,
    found: &mut Vec<String>,
) {
    let mut first: HashMap<&OsStr, &Path> = HashMap::new();
    for path in files.iter().filter(|path| path.starts_with(src)) {
        let Some(file) = path.file_name().filter(|file| !SHARED_NAMES.iter().any(|n| file == n))
        else {
            continue;
        };
        if let Some(other) = first.insert(file, path) {
            found.push(format!("{}:1: has the name of {}", name(path), name(other)));
        }
    }
}

/// A type's methods stand in its own file, or in its folder: that of its file, below the root.
fn check_impls(tree: &Tree, name: impl Fn(&Path) -> String, found: &mut Vec<String>) {
    let sources: Vec<_> = tree.files.iter().map(|(path, _)| (path, Source::read(path))).collect();
    let mut homes: HashMap<String, Vec<&Path>> = HashMap::new();
    for (path, source) in &sources {
        for word in ["struct", "enum", "union"] {
            for at in occurrences(&source.shipped, word) {
                let rest = source.shipped[at + word.len()..].trim_start();
                homes.entry(leading_word(rest).to_owned()).or_default().push(path.as_path());
            }
        }
    }
    let root = tree.files.iter().find(|(_, module)| module.is_empty());
    let src = root.and_then(|(path, _)| path.parent()).unwrap();
    for (path, source) in &sources {
        for at in occurrences(&source.shipped, "impl") {
            let Some(ty) = inherent(&source.shipped[at + "impl".len()..]) else { continue };
            let Some(homes) = homes.get(&ty) else { continue };
            let is_near = |home: &&Path| {
                let folder = home.parent().unwrap();
                path.as_path() == *home
                    || path.starts_with(home.with_extension(""))
                    || folder != src && path.starts_with(folder)
            };
            if !homes.iter().any(is_near) {
                let line = line_of(&source.shipped, at);
                found.push(format!("{}:{line}: methods of {ty} far from it", name(path)));
            }
        }
    }
}

fn leading_word(code: &str) -> &str {
    &code[..code.bytes().take_while(|&byte| is_word(byte)).count()]
}

/// The type of an inherent implementation, from behind its `impl` on; `None` for a trait's.
fn inherent(code: &str) -> Option<String> {
    let head = &code[..code.find('{')?];
    let mut rest = head.trim_start();
    if rest.starts_with('<') {
        let mut depth = 0;
        let end = rest.bytes().position(|byte| {
            depth += i32::from(byte == b'<') - i32::from(byte == b'>');
            depth == 0
        })?;
        rest = rest[end + 1..].trim_start();
    }
    let ends_item = head.contains(';') || head.contains(')') && !head.contains('<');
    (!ends_item && occurrences(rest, "for").next().is_none()).then(|| leading_word(rest).to_owned())
}

/// The modules of a crate: the files that are shipped, and the order in which each lists its own.
struct Tree {
    files: Vec<(PathBuf, Vec<String>)>,
    order: HashMap<Vec<String>, Vec<String>>,
}

impl Tree {
    fn of(root: &Path) -> Self {
        let mut tree = Self { files: Vec::new(), order: HashMap::new() };
        tree.visit(root, Vec::new());
        tree
    }

    fn visit(&mut self, file: &Path, module: Vec<String>) {
        let names = declared(&Source::read(file).shipped);
        let directory = match file.file_name().and_then(|name| name.to_str()) {
            Some("lib.rs" | "main.rs" | "mod.rs") => file.with_file_name(""),
            _ => file.with_extension(""),
        };
        for name in &names {
            let flat = directory.join(format!("{name}.rs"));
            let file = if flat.exists() { flat } else { directory.join(name).join("mod.rs") };
            self.visit(&file, [&module[..], std::slice::from_ref(name)].concat());
        }
        self.files.push((file.to_owned(), module.clone()));
        self.order.insert(module, names);
    }

    fn check(&self, name: impl Fn(&Path) -> String, found: &mut Vec<String>) {
        for (file, module) in &self.files {
            let source = Source::read(file);
            let name = name(file);
            for word in PANICS.iter().filter(|_| !name.starts_with(TESTS_ONLY)) {
                for at in occurrences(&source.shipped, word) {
                    let line = line_of(&source.shipped, at);
                    found.push(format!("{name}:{line}: {word} outside tests"));
                }
            }
            for (at, target) in references(&source.shipped, module) {
                if let Some(later) = self.later(module, &target) {
                    let line = line_of(&source.shipped, at);
                    found.push(format!("{name}:{line}: uses {later}, which comes after it"));
                }
            }
        }
        found.dedup();
    }

    /// The module on the way to `target` that is listed after the one that `module` is in.
    fn later(&self, module: &[String], target: &[String]) -> Option<String> {
        let common = module.iter().zip(target).take_while(|(own, other)| own == other).count();
        let (own, other) = (module.get(common)?, target.get(common)?);
        let order = self.order.get(&module[..common])?;
        let place = |name: &String| order.iter().position(|listed| listed == name);
        match place(other) {
            Some(there) => (there > place(own)?).then(|| other.clone()),
            // An item of the parent is before its modules; the root's are names of what is in them.
            None => (common == 0).then(|| format!("{other} by the crate's own face")),
        }
    }
}

/// The modules that a file lists, each in a file of its own, in order.
fn declared(code: &str) -> Vec<String> {
    let name = |at: usize| {
        let (name, _) = code[at + "mod ".len()..].split_once(';')?;
        name.bytes().all(is_word).then(|| name.to_owned())
    };
    occurrences(code, "mod ").filter_map(name).collect()
}

/// Every path from `crate` or `super` on in `code`, a file of `module`: where it stands, and what
/// it names, from the crate's root on.
fn references(code: &str, module: &[String]) -> Vec<(usize, Vec<String>)> {
    let mut all = Vec::new();
    for (word, base) in [("crate::", 0), ("super::", module.len().saturating_sub(1))] {
        // A macro's `$crate` is written for files after it.
        let is_first = |&at: &usize| !code[..at].ends_with("super::") && !code[..at].ends_with('$');
        for at in occurrences(code, word).filter(is_first) {
            let (mut base, mut rest) = (base, at + word.len());
            while code[rest..].starts_with("super::") {
                (base, rest) = (base.saturating_sub(1), rest + "super::".len());
            }
            let mut paths = Vec::new();
            expand(&code[rest..], &module[..base], &mut paths);
            all.extend(paths.into_iter().map(|path| (at, path)));
        }
    }
    all
}

/// Appends the paths of the tree that `code` begins with (`a::b`, `{a, b::{c, d}}`), each behind
/// `base`. Returns its length.
fn expand(code: &str, base: &[String], paths: &mut Vec<Vec<String>>) -> usize {
    let mut at = code.len() - code.trim_start().len();
    if code[at..].starts_with('{') {
        at += 1;
        loop {
            at += expand(&code[at..], base, paths);
            at += code[at..].len() - code[at..].trim_start().len();
            if !code[at..].starts_with(',') {
                return at + 1;
            }
            at += 1;
        }
    }
    let len = code[at..].bytes().take_while(|&byte| is_word(byte)).count();
    if len == 0 {
        return at;
    }
    let path = [base, &[code[at..at + len].to_owned()]].concat();
    at += len;
    if code[at..].starts_with("::") {
        return at + 2 + expand(&code[at + 2..], &path, paths);
    }
    let renamed = code[at..].trim_start().strip_prefix("as ").map_or(0, |new| {
        let end =
            new.len() - new.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').len();
        code[at..].len() - new.len() + end
    });
    paths.push(path);
    at + renamed
}

fn breaches(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    check_file(&Source::new(text.to_owned()), "f.rs", &mut found);
    check_local_names(text, "f.rs", &mut found);
    found
}

#[test]
fn a_file_that_keeps_the_rules_is_not_reported() {
    let text = "//! A file.\nfn f() -> char { let _s = \"unsafe {\"; '{' } // unsafe\n";
    assert_eq!(breaches(text), Vec::<String>::new());
}

#[test]
fn each_rule_for_a_file_is_seen_when_it_is_broken() {
    assert!(breaches("fn f() {}\n")[0].starts_with("f.rs:1: does not begin"));
    assert!(breaches("//! A\n\nunsafe fn f() {}\n")[0].starts_with("f.rs:3: unsafe"));
    assert!(breaches("//! A\n#![allow(unsafe_code)]\nunsafe fn f() {}\n").is_empty());
    let vague = format!("//! A\n// It waits for {}.\n", VAGUE[0]);
    assert!(breaches(&vague)[0].starts_with("f.rs:2: a comment about"));
    let long = format!("//! A\nfn f() {{\n{}}}\n", "    g();\n".repeat(MAX_FUNCTION_LINES));
    assert!(breaches(&long)[0].starts_with("f.rs:2: a function of 72 lines"));
    let lines = format!("//! A\n{}", "\n".repeat(MAX_FILE_LINES));
    assert!(breaches(&lines)[0].starts_with("f.rs:601:"));
    let place = format!("//! See {}{}/x\n", LOCAL[0].0, LOCAL[0].1);
    assert!(breaches(&place)[0].starts_with("f.rs:1: mentions"));
}

#[test]
fn only_what_is_shipped_is_searched_for_panics() {
    let source =
        Source::new("fn f() { a.unwrap() }\n#[cfg(test)]\nmod tests { b.unwrap() }\n".into());
    assert_eq!(occurrences(&source.shipped, PANICS[0]).count(), 1);
    assert_eq!(source.shipped.len(), source.text.len());
}

#[test]
fn a_use_of_a_later_module_is_seen_through_groups_and_super() {
    let names = |list: &[&str]| list.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let order =
        HashMap::from([(names(&[]), names(&["a", "b"])), (names(&["b"]), names(&["c", "d"]))]);
    let tree = Tree { files: Vec::new(), order };
    let later = |code: &str, module: &[&str]| {
        let module = names(module);
        let all = references(code, &module);
        all.iter().filter_map(|(_, target)| tree.later(&module, target)).collect::<Vec<_>>()
    };
    assert_eq!(later("use crate::{a::X, b::{Y, Z}};", &["a"]), ["b", "b"]);
    assert_eq!(later("use super::{Item, d as e, c::X};", &["b", "c"]), ["d"]);
    assert_eq!(later("use super::super::a::X;", &["b", "c"]), Vec::<String>::new());
    assert_eq!(later("fn f(x: crate::b::c::X) {}", &["b", "d"]), Vec::<String>::new());
    assert_eq!(later("use crate::Face;", &["a"]), ["Face by the crate's own face"]);
}

#[test]
fn an_inherent_implementation_is_told_from_a_traits() {
    assert_eq!(inherent(" Engine { }"), Some("Engine".to_owned()));
    assert_eq!(inherent("<Q: Queue<T>> Engine<Q> where Q: X { }"), Some("Engine".to_owned()));
    assert_eq!(inherent("<Q> Drop for Engine<Q> { }"), None);
}

/// Files beside a frontend's own that name vhost-user or ublk: rows in tables, options, commands, and what an upgrade tells of
/// each. A new frontend needs fewer.
const NAMES_OF_FRONTENDS: [&str; 19] = [
    "server/event_loop.rs",
    "server/frontend_kind.rs",
    "server/frontends/export_device.rs",
    "server/frontends.rs",
    "server/lib.rs",
    "server/threads/pause.rs",
    "daemon/config/mod.rs",
    "daemon/config/notation.rs",
    "daemon/devices.rs",
    "daemon/disks/served_disks.rs",
    "daemon/upgrade/messages.rs",
    "daemon/upgrade/sender.rs",
    "control/api.rs",
    "cli/args/control_args.rs",
    "cli/args/mod.rs",
    "cli/args/serve_args.rs",
    "cli/commands/control.rs",
    "cli/commands/mod.rs",
    "cli/lib.rs",
];

/// A frontend is added in its own files and a few tables (CONTRIBUTING, "A frontend").
#[test]
fn only_tables_name_a_frontend_outside_of_its_own_files() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut naming = Vec::new();
    for of in ["server", "daemon", "control", "cli"] {
        let src = crates.join(format!("nowait-{of}/src"));
        for path in files_below(&src) {
            let own = path.strip_prefix(&src).unwrap().to_string_lossy().into_owned();
            let is_named = |text: &str| ["vhost", "ublk"].iter().any(|it| text.contains(it));
            let is_test = own.contains("tests");
            if !is_named(&own) && !is_test && is_named(&Source::read(&path).shipped.to_lowercase())
            {
                naming.push(format!("{of}/{own}"));
            }
        }
    }
    assert_eq!(naming, NAMES_OF_FRONTENDS);
}
