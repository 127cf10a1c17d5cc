_list:
    @{{ just_executable() }} --list

# The command as users run it
build:
    cargo build --release

# All tests; those against other people's tools say so where a tool is missing
test *args:
    cargo test {{ args }}

# What CI checks without running anything
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# This server beside the others of this machine
bench *args:
    cargo run --release -- bench peers {{ args }}

# The kernel and initramfs of the guest test, then the test
guest:
    scripts/guest-files
    cargo test -p nowait-cli --test suite guest -- --nocapture

# Everything, as CI does it; installs what is missing
ci:
    .ci/run
