#!/bin/sh
# Build step of all images: install remora and its runtimes from wheels into one directory.
#
# usage: install.sh EXTRAS [REQUIREMENTS]
#   EXTRAS        remora's extras, such as onnx,grpc
#   REQUIREMENTS  file with additional pinned packages
#   MODEL_REQUIREMENTS  requirements file of a model, which may replace pinned packages by other versions
#   PREFIX        environment's directory (default /opt/remora; not relocatable, because it contains its path)
#   SOURCE_DATE_EPOCH  time of all files, in seconds (default 0)
#   OFFLINE       if not empty, take every wheel from dist/ and use no index
set -eu

extras=$1
requirements=${2:-}
prefix=${PREFIX:-/opt/remora}
build=$(cd "$(dirname "$0")/.." && pwd)

set -- "$build"/dist/remora-*.whl
[ -f "$1" ] || { echo "install.sh: no wheel of remora in $build/dist: write this folder again, or in a checkout run make wheel" >&2; exit 2; }
[ $# -eq 1 ] || { echo "install.sh: several wheels of remora in $build/dist: keep only one" >&2; exit 2; }
set -- "$1[$extras]" --constraint "$build/constraints.txt" --find-links "$build/dist"
[ -z "$requirements" ] || set -- "$@" --requirement "$requirements"
[ -z "${OFFLINE:-}" ] || set -- "$@" --no-index

install() {
    python3 -m pip --python "$prefix/bin/python" install --quiet --disable-pip-version-check --no-cache-dir --no-compile "$@"
}

# Without pip, because the image installs no packages; saves 12 MB.
python3 -m venv --without-pip "$prefix"
install --only-binary=:all: "$@"
if [ -n "${MODEL_REQUIREMENTS:-}" ]; then
    # With remora, so that its version ranges hold, and without constraints, because the model's versions count.
    set -- "$1" --find-links "$build/dist" --requirement "$build/$MODEL_REQUIREMENTS"
    [ -z "${OFFLINE:-}" ] || set -- "$@" --no-index
    install "$@"
fi

# Compile now, because a read-only root cannot. Unchecked, because a layer's timestamps are arbitrary.
"$prefix/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib"
"$prefix/bin/python" -I -m remora_deploy.images.sbom > "$prefix/sbom.cdx.json"
"$prefix/bin/python" -I -m remora_deploy.images.sbom --licences > "$prefix/licenses.txt"
# World-readable, because the platform chooses the user.
chmod -R a+rX "$prefix"
# One time for all files, so that the same wheels give the same layer.
find "$prefix" -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH:-0}" {} +
