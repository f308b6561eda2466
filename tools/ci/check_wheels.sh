#!/usr/bin/env bash
# Builds every wheel and imports each library in a clean environment that holds only its own dependencies.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

uv build -q --all-packages --wheel --out-dir "$work/dist"
uv export -q --locked --no-dev --no-emit-workspace --no-hashes -o "$work/pins.txt"
for package in mx_core mx_kernels mx_trainer ptxsim; do
  uv venv -q "$work/$package"
  wheel=$(ls "$work"/dist/"$package"-*.whl)
  uv pip install -q --python "$work/$package" --find-links "$work/dist" --constraint "$work/pins.txt" "$wheel"
  (cd "$work" && "$work/$package/bin/python" -c "import $package; print('wheel ok:', $package.__name__)")
done
if "$work/mx_core/bin/python" -c "import cutlass" 2>/dev/null; then
  echo "mx_core must not bring in the DSL" >&2
  exit 1
fi

uv run -q --isolated --package mx-core python -c "import mx_core; print('uv run --package mx-core ok')"
