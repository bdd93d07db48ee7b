# Sourced by the scripts beside it: what agent-box needs from Debian or Ubuntu.
# Expects `fail` and sets `python`.

packages=(python3 python3-venv bubblewrap libseccomp2 ca-certificates)
python=/usr/bin/python3 # the system's own: others may lie where another account cannot read

# Installs the packages that are missing, by sudo where that may ask or need not.
install_packages() {
  local missing=() package as_root=()
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  echo "missing Debian packages: ${missing[*]}"
  if ((EUID != 0)); then
    command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; } ||
      fail "as root, run: apt-get update && apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  # A list of a third party that cannot be fetched is no reason to stop; the install decides.
  "${as_root[@]}" apt-get update -q || echo "apt-get update had errors, going on"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${missing[@]}" ||
    fail "apt-get could not install ${missing[*]}"
}
