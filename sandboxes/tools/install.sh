#!/usr/bin/env bash
# What the CRIU runtime needs on a Debian machine, as root: runc, and a CRIU that knows new kernels.
#
# CRIU 3.17 and 4.1 fail on Linux ≥ 6.12 or with TCP sockets; 4.2 is in Debian's unstable suite and wants a newer C
# library than a stable Debian has. So it is unpacked with its libraries into a folder of its own and nothing else on the
# machine changes. The mirror is the one that the machine uses already.
#
# Run again it does nothing. What it can't do it says, and ends with 0: tests that need it are skipped with the reason.
set -uo pipefail

FOLDER=${SANDBOX_TOOLS:-/opt/sandbox-tools}
PACKAGES="criu libcompel1 libc6 libbsd0 libmd0 libgnutls30t64 libnet9 libnftables1 libnftnl11 libmnl0 libxtables12
  libjansson4 libnl-3-200 libprotobuf-c1 libuuid1 libp11-kit0 libidn2-0 libunistring5 libtasn1-6 libnettle8t64
  libhogweed6t64 libgmp10 libffi8"

skip() {
  echo "sandbox tools: $*; tests that need CRIU will be skipped"
  exit 0
}

works() { command -v runc >/dev/null && command -v criu >/dev/null && criu check >/dev/null 2>&1; }

works && exit 0
[ "$(id -u)" = 0 ] || skip "not root"
command -v apt-get >/dev/null || skip "no apt-get here"
export DEBIAN_FRONTEND=noninteractive
if ! command -v runc >/dev/null || ! command -v patchelf >/dev/null; then
  apt-get update -qq || echo "sandbox tools: apt-get update failed, going on with the lists that are there"
  apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends runc patchelf >/dev/null || skip "runc and patchelf can't be installed"
fi
works && exit 0

uri=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian //p' | head -n 1)
[ -n "$uri" ] || skip "no Debian mirror in apt's sources"
key=/usr/share/keyrings/debian-archive-keyring.gpg
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/packages" "$work/root"
echo "deb $([ -e $key ] && echo "[signed-by=$key]") $uri sid main" >"$work/sid.list"
options=(-o "Dir::Etc::SourceList=$work/sid.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$work/lists"
  -o APT::Sandbox::User=root -o APT::Get::List-Cleanup=0)
apt-get "${options[@]}" update -qq || skip "the list of Debian's unstable suite can't be read"
# shellcheck disable=SC2086
(cd "$work/packages" && apt-get "${options[@]}" download -qq $PACKAGES) || skip "CRIU can't be downloaded"
for package in "$work"/packages/*.deb; do
  dpkg -x "$package" "$work/root" || skip "$(basename "$package") can't be unpacked"
done
rm -rf "$FOLDER"
mkdir -p "$(dirname "$FOLDER")"
mv "$work/root" "$FOLDER"
loader=$(find "$FOLDER" -name 'ld-linux*.so.*' | head -n 1)
libraries=$(dirname "$(find "$FOLDER" -name 'libc.so.6' | head -n 1)")
patchelf --set-interpreter "$loader" --set-rpath "$libraries" --force-rpath "$FOLDER/usr/sbin/criu" ||
  skip "CRIU's libraries can't be tied to it"
ln -sf "$FOLDER/usr/sbin/criu" /usr/local/sbin/criu
works || skip "CRIU does not work on this kernel: $(criu check 2>&1 | tail -n 1)"
echo "sandbox tools: $(criu --version | head -n 1), $(runc --version | head -n 1)"
