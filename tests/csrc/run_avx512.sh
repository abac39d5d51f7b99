#!/usr/bin/env bash
# Runs the harness with its AVX-512 build on any machine: in Bochs, which executes these instructions (QEMU does not), on a Linux
# kernel with nothing but busybox beside it. Arguments go to the harness; the default takes an idle core some ten minutes.
#
#   KERNEL=/boot/vmlinuz-...   a Linux kernel to boot; default: the newest in /boot
#   CPU=corei7_skylake_x       the processor, one of bochs --help cpu
#   ISA=avx512                 the build; not avx512bf16: Bochs 3.0 gets the upper half of VCVTNE2PS2BF16 wrong, 2.7 lacks it
#   LIMIT=900                  seconds after which to give up
#   CMAKE_ARGS=-D...           options for the build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

KERNEL=${KERNEL:-$({ ls -v /boot/vmlinuz-* 2>/dev/null || true; } | tail -n 1)}
missing=
for tool in cmake bochs xorriso cpio busybox; do command -v $tool >/dev/null || missing+=" $tool"; done
for file in /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 /usr/share/bochs/BIOS-bochs-latest \
  /usr/share/bochs/VGABIOS-lgpl-latest "${KERNEL:-/boot/vmlinuz-*}"; do [ -e "$file" ] || missing+=" $file"; done
if [ -n "$missing" ]; then
  echo "not here:$missing" >&2
  echo "on Debian: apt-get install cmake g++ bochs bochsbios vgabios xorriso cpio busybox-static isolinux syslinux-common" \
    "linux-image-cloud-amd64 (or unpack that last one with dpkg-deb -x and name its vmlinuz in KERNEL)" >&2
  exit 2
fi

build=build/avx512
# shellcheck disable=SC2086
cmake -S . -B $build -DATTEMPER_HARNESS=ON -DATTEMPER_INSTRUCTION_SETS="${ISA:-avx512}" -DCMAKE_EXE_LINKER_FLAGS=-static \
  -DOpenMP_gomp_LIBRARY="$(g++ -print-file-name=libgomp.a)" ${CMAKE_ARGS:-}
cmake --build $build --parallel
disk=$build/disk root=$build/root
rm -rf $disk $root
mkdir -p $disk $root/bin $root/dev $root/proc
cp "$(command -v busybox)" $root/bin/
cp $build/harness $root/
cat >$root/init <<INIT
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
exec >/dev/ttyS0 2>&1
echo "processor: \$(/bin/busybox grep -m 1 flags /proc/cpuinfo | /bin/busybox tr ' ' '\n' | /bin/busybox grep avx | /bin/busybox xargs)"
/harness --isa ${ISA:-avx512} ${*:---count 200}
/bin/busybox sleep 1
/bin/busybox poweroff -f
INIT
chmod +x $root/init
(cd $root && find . | cpio --quiet -o -H newc | gzip -1) >$disk/initrd.gz
cp "$KERNEL" $disk/linux
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 $disk/
# Without xsavec and xsaves (321, 323): Bochs gives them a size that Linux does not believe, and then there are no vectors at all.
cat >$disk/isolinux.cfg <<'CONFIG'
default linux
label linux
  kernel linux
  append initrd=initrd.gz console=ttyS0 loglevel=1 tsc=reliable lpj=1000000 nokaslr mitigations=off clearcpuid=321,323
CONFIG
xorriso -as mkisofs -quiet -o $build/disk.iso -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table $disk

cat >$build/bochsrc <<CONFIG
cpu: model=${CPU:-corei7_skylake_x}, ips=50000000
megs: 512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$build/disk.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$build/output.txt
display_library: rfb, options="timeout=0"
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
plugin_ctrl: speaker=0, sb16=0, es1370=0, gameport=0, usb_uhci=0, parallel=0, busmouse=0, e1000=0, ne2k=0, pcipnic=0
clock: sync=none
log: $build/bochs.log
panic: action=fatal
CONFIG
echo c >$build/debugger  # Debian's Bochs has its debugger in; it is told to go on
: >$build/output.txt
tail -f $build/output.txt &
trap 'kill $!' EXIT
timeout "${LIMIT:-900}" bochs -q -f $build/bochsrc -rc $build/debugger </dev/null >$build/bochs.out 2>&1 || true  # it ends so
sleep 1
grep -q ' 0 failures, instruction set' $build/output.txt
