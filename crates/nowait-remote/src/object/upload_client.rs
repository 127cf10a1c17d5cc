//! The requests of uploads: a layer over those of the HTTP client.
//!
//! Invariant: an answer to a request that changes something has at most `ANSWER_BYTES`; one of success
//! whose body is an error of S3 is that error.

use std::error::Error as _;

use async_trait::async_trait;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{HeaderValue, IF_NONE_MATCH};
use hyper::{Method, StatusCode};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};

use crate::object::fault::BadAnswer;
use crate::object::http_client::word;

/// The longest body of an answer to another request than GET in bytes.
const ANSWER_BYTES: usize = 64 << 10;

/// Makes the clients of uploads from those of `inner`.
#[derive(Debug)]
pub(super) struct UploadConnector<C> {
    pub(super) inner: C,
    /// Whether the store is to refuse the last request of an upload if the object exists. Only for S3,
    /// where that header need not be signed.
    pub(super) creates: bool,
}

impl<C: HttpConnector> HttpConnector for UploadConnector<C> {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = self.inner.connect(options)?;
        Ok(HttpClient::new(UploadClient { client, creates: self.creates }))
    }
}

#[derive(Debug)]
struct UploadClient {
    client: HttpClient,
    creates: bool,
}

impl UploadClient {
    /// Makes a request on the condition that the object does not exist, if the store supports conditions.
    async fn create(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut conditional = request.clone();
        conditional.headers_mut().insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
        match self.client.execute(conditional).await {
            Err(error) if is_unknown(&error) => self.client.execute(request).await,
            answer => answer,
        }
    }
}

/// Whether the store has not implemented something in the request.
fn is_unknown(error: &HttpError) -> bool {
    let answer = error.source().and_then(|source| source.downcast_ref());
    let unknown = StatusCode::NOT_IMPLEMENTED;
    matches!(answer, Some(BadAnswer::Status { status, .. }) if *status == unknown)
}

#[async_trait]
impl HttpService for UploadClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let query = request.uri().query().unwrap_or_default();
        let completes = *request.method() == Method::POST && query.contains("uploadId=");
        let response = match completes && self.creates {
            true => self.create(request).await?,
            false => self.client.execute(request).await?,
        };
        if is_read {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| HttpError::new_boxed(HttpErrorKind::Interrupted, error))?;
        let body = body.to_bytes();
        if let Some(error) = completes.then(|| error_in(&body)).flatten() {
            return Err(HttpError::new(HttpErrorKind::Unknown, error));
        }
        let body = Full::new(body).map_err(|never| match never {});
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// The error that S3 sends with the status of success, because it has sent that before the upload was
/// complete.
fn error_in(body: &Bytes) -> Option<BadAnswer> {
    let text = String::from_utf8_lossy(body);
    let (_, error) = text.split_once("<Error>")?;
    let code = error.split_once("<Code>").and_then(|(_, rest)| rest.split_once('<'));
    let code = code.and_then(|(code, _)| word(code));
    let status = match code.as_deref() {
        Some("InternalError") => StatusCode::INTERNAL_SERVER_ERROR,
        Some("SlowDown" | "ServiceUnavailable") => StatusCode::SERVICE_UNAVAILABLE,
        Some("PreconditionFailed") => StatusCode::PRECONDITION_FAILED,
        Some("NoSuchUpload") => StatusCode::NOT_FOUND,
        _ => StatusCode::BAD_REQUEST,
    };
    Some(BadAnswer::Status { status, code, region: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_with_the_status_of_success_is_found() {
        let found = |text: &'static str| error_in(&Bytes::from(text)).map(|it| it.to_string());
        assert_eq!(found("<CompleteMultipartUploadResult/>"), None);
        let text = found("\n <Error><Code>InternalError</Code></Error>").unwrap();
        assert_eq!(text, "the store has an error (500 InternalError)");
        let text = found("<Error><Code>InvalidPart</Code></Error>").unwrap();
        assert_eq!(text, "the store refuses the request (400 InvalidPart)");
    }
}
