_list:
    @{{ just_executable() }} --list

# The command as users run it
build:
    cargo build --release

# All tests; an interoperability test whose tool is missing reports that
test *args:
    cargo test --workspace {{ args }}

# What to run between two edits: the unit tests of the engine, the images, the protocol and the server
test-fast:
    cargo test --lib -p nowait -p nowait-image -p nowait-nbd -p nowait-server -p nowait-control

# Fresh seeds for the simulator and the fuzz targets
hunt minutes="60":
    .ci/hunt {{ minutes }}

# The checks of CI that run no program
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# Benchmarks of this server and the other servers of this machine
bench *args:
    cargo build --profile dist
    target/dist/nowait bench peers {{ args }}

# The kernel and initramfs of the guest test, then the test
guest:
    scripts/guest-files
    cargo test -p nowait-cli --test suite guest -- --nocapture

# All steps of CI; installs missing packages
ci:
    .ci/run
