#!/bin/sh
# The build step that all images share: remora and its runtimes, from wheels alone, as one directory.
#
# usage: install.sh EXTRAS [REQUIREMENTS]
#   EXTRAS        remora's extras, such as onnx,grpc
#   REQUIREMENTS  a file of further pinned packages
#   PREFIX        where the environment goes (default /opt/remora; its path is written into it, so do not move it)
#   OFFLINE       not empty: take every wheel from dist/ and ask no index
set -eu

extras=$1
requirements=${2:-}
prefix=${PREFIX:-/opt/remora}
build=$(cd "$(dirname "$0")/.." && pwd)

set -- "$build"/dist/remora-*.whl
[ -f "$1" ] || { echo "install.sh: no wheel of remora in $build/dist: make wheel" >&2; exit 2; }
[ $# -eq 1 ] || { echo "install.sh: several wheels of remora in $build/dist: leave one" >&2; exit 2; }
set -- "$1[$extras]" --constraint "$build/constraints.txt" --find-links "$build/dist"
[ -z "$requirements" ] || set -- "$@" --requirement "$requirements"
[ -z "${OFFLINE:-}" ] || set -- "$@" --no-index

# Without pip inside: 12 MB less, and nothing in the image installs packages.
python3 -m venv --without-pip "$prefix"
python3 -m pip --python "$prefix/bin/python" install \
    --quiet --disable-pip-version-check --no-cache-dir --no-compile --only-binary=:all: "$@"

# A read-only root never gets bytecode of its own. Unchecked: a layer's timestamps mean nothing.
"$prefix/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib"
"$prefix/bin/python" "$build/containers/sbom.py" > "$prefix/sbom.cdx.json"
# Whoever the platform runs as may read it.
chmod -R a+rX "$prefix"
