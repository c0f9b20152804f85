#!/usr/bin/env bash
# Make .venv with pinned versions, or find that it is made already.
#
#   scripts/setup_env.sh [--extra NAME | --group NAME]...
#
# Installs this project in editable form with the named extras and dependency groups of
# pyproject.toml. The base Python is $PYTHON, or else python3. pip's own configuration and
# environment variables hold, for instance for another index or for a CPU-only build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base_python="${PYTHON:-python3}"
python=.venv/bin/python

extras=""
groups=()
names=()
while (($#)); do
  case "${1} ${2:-}" in
    "--extra "?*) extras="${extras:+$extras,}$2" ;;
    "--group "?*) groups+=(--group "$2") ;;
    *)
      echo "Usage: scripts/setup_env.sh [--extra NAME | --group NAME]..." >&2
      exit 2
      ;;
  esac
  names+=("$2")
  shift 2
done

if ! "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "$base_python: wanted Python 3.11 or newer. Name another one: PYTHON=python3.12 $0" >&2
  exit 1
fi

# A stamp is written last, so an interrupted set-up is done again. The folder is part of it, since
# an editable install has to be redone where the folder has moved.
stamp=".venv/.installed-$(
  printf '%s\n' "$PWD" "$extras" "${groups[@]+"${groups[@]}"}" |
    cat - pyproject.toml scripts/constraints.txt |
    "$base_python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'
)"
# The second test finds a .venv whose base Python is gone.
if [[ -e "$stamp" ]] && "$python" -c '' 2>/dev/null; then
  exit 0
fi

echo "Setting up .venv for ${names[*]:-the library}; the first time takes a minute or more."
# Python makes a folder without pip where its venv package is incomplete: then it is made again.
if ! "$python" -m pip --version >/dev/null 2>&1; then
  "$base_python" -m venv --clear .venv
fi
install=("$python" -m pip install -qq --disable-pip-version-check --constraint scripts/constraints.txt)
"${install[@]}" --upgrade pip # dependency groups need pip 25.1
# Without build isolation the build backend is pinned too, and not fetched for each build.
"${install[@]}" hatchling editables
"${install[@]}" --no-build-isolation --editable ".${extras:+[$extras]}" "${groups[@]+"${groups[@]}"}"
touch "$stamp"
