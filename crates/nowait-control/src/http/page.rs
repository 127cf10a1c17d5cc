//! The page for people at `GET /`: one file, which the program carries with it.
//!
//! Invariant: the page loads nothing and sends nothing but requests to this server, as its security
//! policy says (CSP); it has no data before it has asked for them as any client does.

use std::hash::{BuildHasher, RandomState};

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// The page; `NONCE` stands for what its policy knows its own script and style by.
const PAGE: &str = include_str!("page.html");

/// The page.
pub(crate) async fn page() -> Response {
    // The keys of a hasher are random: text in the page cannot guess it.
    let nonce = format!("{:016x}", RandomState::new().hash_one(PAGE.len()));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    let body = PAGE.replace("nonce=\"NONCE\"", &format!("nonce=\"{nonce}\""));
    (headers, [(header::CONTENT_SECURITY_POLICY, policy)], body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy_and_body() -> (String, String) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (head, body) = page().await.into_parts();
            let policy = head.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            (policy.to_owned(), String::from_utf8(body.to_vec()).unwrap())
        })
    }

    #[test]
    fn the_policy_lets_only_the_own_script_and_style_run_and_no_other_place_be_asked() {
        let (policy, body) = policy_and_body();
        assert!(policy.starts_with("default-src 'none'; script-src 'nonce-"), "{policy}");
        let nonce = policy.split("'nonce-").nth(1).unwrap().split('\'').next().unwrap();
        assert_eq!(body.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
        assert_eq!(body.matches("NONCE").count(), 0);
        assert_ne!(policy, policy_and_body().0, "the nonce is guessed easily");
    }

    #[test]
    fn the_page_names_no_other_place_and_makes_no_markup_of_texts() {
        let places: Vec<_> = PAGE.match_indices("//").map(|(at, _)| &PAGE[at..]).collect();
        let is_own =
            |text: &&str| text.starts_with("// ") || text.starts_with("//www.w3.org/2000/svg");
        assert!(places.iter().all(is_own), "{places:?}");
        for way in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "src="]
        {
            assert!(!PAGE.contains(way), "{way}");
        }
    }
}
