//! Words that the field does not use, counted over the whole workspace: a number here only goes down.
//!
//! Invariant: a change that adds such a word fails, and one that removes some lowers the number.

use std::fs;
use std::path::{Path, PathBuf};

/// Comments that open with a word that names nothing: a comment's first word is the noun it is about.
const OPENERS: usize = 0;
const OPENER_WORDS: [&str; 6] = ["What ", "That of ", "Those of ", "The same ", "As ", "As,"];
/// Texts for users, in strings and help, with "is no X" for "is not an X"; "there is no X" is well.
const NO_NOUNS_IN_TEXTS: usize = 1;
/// "is no X" in comments.
const NO_NOUNS_IN_COMMENTS: usize = 5;
/// "beside" in comments and texts.
const BESIDE: usize = 267;
/// "ends" and "ended", for which there are completes, closes, exits.
const ENDS: usize = 1345;

fn sources_below(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources_below(&path, files);
        } else if path.extension().is_some_and(|end| end == "rs")
            && !path.ends_with("nowait/tests/tidy_prose.rs")
        {
            files.push(path);
        }
    }
}

/// The text of a line's comment, if the line is one.
fn comment(line: &str) -> Option<&str> {
    line.trim_start()
        .strip_prefix("//")
        .map(|rest| rest.trim_start_matches(['/', '!']).trim_start())
}

/// How often `words` stand in `text` as whole words.
fn occurrences(text: &str, words: &str) -> usize {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(words)
        .filter(|(at, _)| {
            let (before, after) =
                (text[..*at].chars().next_back(), text[at + words.len()..].chars().next());
            !is_word(before) && !is_word(after)
        })
        .count()
}

/// "is no" and "are no" before a noun, but not "there is no".
fn no_nouns(line: &str) -> usize {
    let all = ["is no", "are no"].map(|words| occurrences(line, words)).iter().sum::<usize>();
    let well =
        ["here is no", "here are no", "is no longer", "are no longer", "is no more", "are no more"];
    all.saturating_sub(well.map(|words| line.matches(words).count()).iter().sum())
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    openers: usize,
    no_nouns_in_texts: usize,
    no_nouns_in_comments: usize,
    beside: usize,
    ends: usize,
}

impl Counts {
    fn add(&mut self, source: &str) {
        let mut follows = false;
        for line in source.lines() {
            let comment = comment(line);
            if let Some(text) = comment {
                let opens = !follows && OPENER_WORDS.iter().any(|word| text.starts_with(word));
                self.openers += usize::from(opens);
                self.no_nouns_in_comments += no_nouns(text);
            } else {
                self.no_nouns_in_texts += no_nouns(line);
            }
            self.beside += occurrences(line, "beside");
            self.ends += occurrences(line, "ends") + occurrences(line, "ended");
            follows = comment.is_some();
        }
    }
}

#[test]
fn words_that_the_field_does_not_use_become_fewer() {
    let (mut files, mut counts) = (Vec::new(), Counts::default());
    sources_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut files);
    assert!(files.len() > 500, "looked in the wrong place");
    files.iter().for_each(|path| counts.add(&fs::read_to_string(path).unwrap()));
    let allowed = Counts {
        openers: OPENERS,
        no_nouns_in_texts: NO_NOUNS_IN_TEXTS,
        no_nouns_in_comments: NO_NOUNS_IN_COMMENTS,
        beside: BESIDE,
        ends: ENDS,
    };
    assert_eq!(counts, allowed, "more: say it otherwise; fewer: lower the numbers of this file");
}

#[test]
fn each_pattern_is_counted_where_it_is_and_nowhere_else() {
    let mut counts = Counts::default();
    counts.add(
        "/// What it is.\n/// What follows is no opener: it ends beside it.\nlet what = \"it is no file\";\n\
         // There is no such file, and it is no longer there.\nbesides(ends_with);\n",
    );
    let expected =
        Counts { openers: 1, no_nouns_in_texts: 1, no_nouns_in_comments: 1, beside: 1, ends: 1 };
    assert_eq!(counts, expected);
}
