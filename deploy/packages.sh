# Sourced by the scripts beside it: what agent-box needs from Debian or Ubuntu.
# Expects `fail` and sets `python`.

packages=(
  python3 python3-venv bubblewrap libseccomp2 ca-certificates
  qemu-system-x86 e2fsprogs # machines and their data disks
  mmdebstrap erofs-utils uidmap debian-archive-keyring # images are built by these
)
# It fetches the packages of harnesses; one that is there already will do.
command -v npm >/dev/null || packages+=(npm)
python=/usr/bin/python3 # the system's own: others may lie where another account cannot read

# Installs the packages that are missing, by sudo where that may ask or need not.
install_packages() {
  local missing=() package as_root=() status=0 interrupted=''
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  echo "missing Debian packages: ${missing[*]}"
  [[ ${missing[*]} != *npm* ]] || echo "(npm brings hundreds: minutes, unless you have one already)"
  if ((EUID != 0)); then
    command -v sudo >/dev/null && { [[ -t 0 || -t 2 ]] || sudo -n true 2>/dev/null; } ||
      fail "as root, run: apt-get update && apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  # In one call: sudo asks once, and one whose answer did not come is not asked again. A list of
  # a third party that cannot be fetched is no reason to stop; the install decides. What apt-get
  # itself says is thousands of lines for nobody; what is wrong is on stderr.
  trap 'interrupted=1' INT # apt-get ends what dpkg has begun first, and may then call it done
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive bash -c '
    apt-get update -qq || echo "apt-get update had errors, going on"
    exec apt-get install -qq -y --no-install-recommends -o APT::Status-Fd=3 "$@" 3>&1 >/dev/null
  ' bash "${missing[@]}" | show_progress || status=$?
  trap - INT
  [[ -z $interrupted ]] || kill -INT $$
  ((status == 0)) || fail "apt-get could not install ${missing[*]}"
}

# From what apt-get tells on its status descriptor, a line for each tenth of the work.
show_progress() {
  local line told='' step
  trap '' INT # a Ctrl-C is apt-get's, which ends what dpkg has begun, and tells of it here
  while IFS= read -r line; do
    if [[ $line =~ ^(dl|pm)status:.*:([0-9]+)(\.[0-9]+)?: ]]; then
      [[ ${BASH_REMATCH[1]} == dl ]] && step=downloading || step=installing
      step+=" $((BASH_REMATCH[2] / 10 * 10)) %"
      [[ $step == "$told" ]] || echo "  $step"
      told=$step
    else
      printf '%s\n' "$line"
    fi
  done
}

# A venv at DIRECTORY that can install: made anew where making it was cut short, or where the
# system's Python is another one since.
make_sound() {
  "$1/bin/python" -m pip --version >/dev/null 2>&1 && return
  rm -rf "$1"
  "$python" -m venv "$1" || fail "cannot make $1"
}

# As root: gives an account the subordinate uids and gids that building an image needs, unless
# it has some. An ordinary account has got them from useradd; a system account has not.
give_subordinates() {
  local account=$1 file first
  for file in /etc/subuid /etc/subgid; do
    grep -q "^$account:" "$file" 2>/dev/null && continue
    # after the last range of anybody, and where useradd would begin
    first=$({ cat /etc/subuid /etc/subgid 2>/dev/null || true; } |
      awk -F: -v first=100000 '$2 + $3 > first { first = $2 + $3 } END { print first + 0 }')
    if [[ $file == /etc/subuid ]]; then
      usermod --add-subuids "$first-$((first + 65535))" "$account"
    else
      usermod --add-subgids "$first-$((first + 65535))" "$account"
    fi || fail "usermod could not give $account subordinate ids in $file"
  done
}
