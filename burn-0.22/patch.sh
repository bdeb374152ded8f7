#!/usr/bin/env bash
# Makes target/burn-dispatch: the registry's burn-dispatch 0.22.1 with dispatch.diff applied.
set -euo pipefail
cd "$(dirname "$0")"
version=${1:-0.22.1}
to=target/burn-dispatch
if [[ -e $to/Cargo.toml && $to/Cargo.toml -nt dispatch.diff && $to/Cargo.toml -nt patch.sh ]]; then
    exit
fi
registry=${CARGO_HOME:-$HOME/.cargo}/registry/src
if ! compgen -G "$registry/*/burn-dispatch-$version" >/dev/null; then
    # `stock` has no patch, so cargo can fetch for it before there is one.
    cargo fetch --quiet --locked --manifest-path stock/Cargo.toml
fi
from=$(compgen -G "$registry/*/burn-dispatch-$version" | head -1)
rm -rf "$to"
mkdir -p target
cp -r "$from" "$to"
patch --quiet -p1 -d "$to" <dispatch.diff
touch "$to/Cargo.toml"
