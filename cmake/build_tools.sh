#!/usr/bin/env bash
# Installs what builds the package into a virtual environment, $2, made by the interpreter $1: the
# requirements in pyproject.toml, then CMake, ninja and nvcc where the system lacks them. Prints the
# folder of its packages. pip would make such an environment anew for each build, at another path,
# and then compile everything again.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 tools=$2

[[ -x $tools/bin/python ]] || "$python" -m venv --without-pip "$tools"

# Installs the list `required` that a Python program makes.
install() {
  "$tools/bin/python" -c "$1; print(*required, sep='\n')" |
    "$python" -m pip --python "$tools/bin/python" install --quiet --requirement /dev/stdin >&2
}
install "import tomllib; required = tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires']"
install "import scikit_build_core.build as b; required = b.get_requires_for_build_editable()"
echo "$(cd "$tools" && pwd)"/lib/python*/site-packages
