#!/bin/busybox sh
# What the kernel starts: finds the drives by their serials, mounts them, and hands over to
# box-guest. Whatever fails is said on the console, and the machine goes off.
b=/bin/busybox

fail() {
  echo "box-init: $*"
  $b sync
  $b poweroff -f
  while :; do $b sleep 3600; done
}

# Sets `device` to the drive with that serial. Drives are there once their module is loaded;
# it looks again for three seconds all the same.
find_drive() {
  read -r begun rest </proc/uptime
  now=$begun
  while [ "${now%.*}" -le $((${begun%.*} + 3)) ]; do
    for file in /sys/block/*/serial; do
      serial=
      read -r serial <"$file" 2>/dev/null
      if [ "$serial" = "$1" ]; then
        device=${file%/serial}
        device=/dev/${device##*/}
        return
      fi
    done
    $b usleep 10000
    read -r now rest </proc/uptime
  done
  fail "no drive has the serial $1"
}

$b mount -t devtmpfs -o nosuid,noexec,mode=0755 devtmpfs /dev
exec </dev/console >/dev/console 2>&1
$b mount -t proc -o nosuid,nodev,noexec proc /proc || fail "cannot mount proc"
$b mount -t sysfs -o nosuid,nodev,noexec sysfs /sys || fail "cannot mount sysfs"
while read -r module; do
  $b insmod "/modules/$module.ko" || fail "cannot load the module $module"
done </modules/list

find_drive variant
$b mount -t erofs -o ro,nodev "$device" /new || fail "cannot mount the drive variant, $device"
$b mount -t tmpfs -o nosuid,nodev,mode=0755 tmpfs /new/run || fail "cannot mount /run"
$b mkdir -p /new/run/box/guest
find_drive guest
$b mount -t erofs -o ro,nosuid,nodev "$device" /new/run/box/guest ||
  fail "cannot mount the drive guest, $device"
[ -x /new/usr/bin/python3 ] || fail "the drive variant has no /usr/bin/python3"
[ -f /new/run/box/guest/box-guest.pyz ] || fail "the drive guest has no box-guest.pyz"
for directory in dev proc sys; do
  $b mount --move "/$directory" "/new/$directory" || fail "cannot move /$directory"
done
exec $b switch_root /new /usr/bin/python3 -I -S -B /run/box/guest/box-guest.pyz
