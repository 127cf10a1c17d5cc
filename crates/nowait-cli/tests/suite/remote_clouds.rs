//! Objects of Azure Blob Storage and of Google Cloud Storage.
//!
//! Invariant: the servers of these tests answer only what is signed as these services want it.

use std::fs;

use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::WebServer;
use nowait_testkit::{Finished, Random, seed};

use crate::common::{MIB, NOWAIT, Scratch, Server, refusal_under, require_tool, text, tool};

/// The key that Microsoft's emulator has for tests.
const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const OTHER_KEY: &str =
    "Fby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const EMAIL: &str = "test@example.iam.gserviceaccount.com";

/// A store of one object, which is 3 MiB.
fn store(path: &str, signer: Signer) -> (WebServer, Vec<u8>) {
    let object = Random::from_seed(seed()).bytes(3 << 20);
    let store = WebServer::start(object.clone(), path);
    store.script().signer = Some(signer);
    (store, object)
}

/// Uploads a disk of three parts to `url`, once there is no object any more and once over that object.
fn is_uploaded(environment: &[&str], url: &str, store: &WebServer) {
    let scratch = Scratch::new();
    let source = scratch.random("source", 20 * MIB + 512, 1);
    let disk = fs::read(&source).expect("the source");
    store.script().is_absent = true;
    let copy = |more: &[&str]| {
        let command = &mut tool(environment[0]);
        command.args(&environment[1..]).args([NOWAIT, "copy", text(&source), url]).args(more);
        command.succeeds()
    };
    copy(&["--verify"]);
    refusal_under(environment, &["copy", text(&source), url]).says(&["already", "--force"]);
    copy(&["--force"]);
    let script = store.script();
    assert!(script.object == disk);
    assert_eq!((script.uploads.parts, script.unsigned), (6, 0));
    assert!(script.uploads.open.is_empty() && script.uploads.blocks.is_empty());
}

/// Reads the object at `url` by a confined server, before and after the store replaces it.
fn is_read_until_it_changes(environment: &[&str], url: &str, store: &WebServer, object: &[u8]) {
    let server = Server::start_under(environment, url.as_ref(), &["--read-only"]);
    let mut client = server.connect();
    assert!(client.read(0, MIB as u32).expect("a read")[..] == object[..1 << 20]);
    store.script().tag = "\"two\"".into();
    client.read(2 * MIB, 4096).expect_err("another object");
    server.stop();
    let again = Server::start_under(environment, url.as_ref(), &["--read-only"]);
    assert!(again.connect().read(0, 3 * MIB as u32).expect("a read") == object);
    again.stop();
    assert_eq!(store.script().unsigned, 0);
}

#[test]
fn a_blob_of_azure_is_served_and_uploaded_and_another_key_is_refused() {
    let signer = Signer::Azure { account: "account".into(), key: KEY.into() };
    let (store, object) = store("/images/a%20dir/base.img", signer);
    let [endpoint, key, other] = [
        format!("AZURE_STORAGE_ENDPOINT={}", store.root()),
        format!("AZURE_STORAGE_ACCOUNT_KEY={KEY}"),
        format!("AZURE_STORAGE_ACCOUNT_KEY={OTHER_KEY}"),
    ];
    let account = "AZURE_STORAGE_ACCOUNT_NAME=account";
    let url = "az://images/a dir/base.img";
    is_read_until_it_changes(&["env", &endpoint, account, &key], url, &store, &object);
    is_uploaded(&["env", &endpoint, account, &key], url, &store);
    let refused = refusal_under(&["env", &endpoint, account, &other], &["info", url]);
    refused.says(&["refuses access (403 AuthenticationFailed)"]);
    assert!(!refused.error.contains(OTHER_KEY), "{}", refused.error);
    store.script().versions = vec![("versionid=2026".into(), vec![7; 4096])];
    let version = format!("{url}?versionid=2026");
    let info = ["env", &endpoint, account, &key, NOWAIT, "info", &version];
    assert!(tool(info[0]).args(&info[1..]).succeeds().contains("2026"));
    assert_eq!(store.script().unsigned, 1);
    let none = "az://images/none";
    let refused = refusal_under(&["env", &endpoint, account, &key], &["info", none]);
    refused.says(&["no such object (404"]);
}

#[test]
fn an_object_of_google_is_served_and_uploaded_and_another_key_is_refused() {
    nowait_testkit::needs!(require_tool("openssl"));
    let scratch = Scratch::new();
    let [key, other] = ["key", "other"].map(|name| {
        let path = scratch.join(name);
        let to = ["genpkey", "-quiet", "-algorithm", "RSA", "-out", text(&path)];
        tool("openssl").args(to).succeeds();
        path
    });
    let public = scratch.join("public");
    let to = ["-RSAPublicKey_out", "-outform", "DER", "-out", text(&public)];
    tool("openssl").args(["rsa", "-in", text(&key)]).args(to).succeeds();
    let public_key = fs::read(&public).expect("a key");
    let (store, object) =
        store("/images/a%20dir%2Fbase%2Eimg", Signer::Google { email: EMAIL.into(), public_key });
    let [good, bad] = [&key, &other].map(|path| {
        let account = serde_json::json!({
            "type": "service_account",
            "private_key": fs::read_to_string(path).expect("a key"),
            "private_key_id": "1",
            "client_email": EMAIL,
        });
        let file = path.with_extension("json");
        fs::write(&file, account.to_string()).expect("a file");
        format!("GOOGLE_APPLICATION_CREDENTIALS={}", text(&file))
    });
    let root = format!("GOOGLE_BASE_URL={}", store.root());
    let url = "gs://images/a dir/base.img";
    is_read_until_it_changes(&["env", &root, &good], url, &store, &object);
    is_uploaded(&["env", &root, &good], url, &store);
    let refused = refusal_under(&["env", &root, &bad], &["info", url]);
    refused.says(&["does not accept the credentials (401 AuthenticationRequired)"]);
    store.script().versions = vec![("generation=17".into(), vec![7; 4096])];
    let version = format!("{url}?generation=17");
    let info = ["env", &root, &good, NOWAIT, "info", &version];
    assert!(tool(info[0]).args(&info[1..]).succeeds().contains(" 17"));
    let refused = refusal_under(&["env", &root, &good], &["info", "gs://images/none"]);
    refused.says(&["no such object (404"]);
}
