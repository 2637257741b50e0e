# Makes, in this mount namespace, a root of an image and of the host's directories on /mnt.
# enter.sh IMAGE MOUNTS: as --container-mounts has them (SRC:DST[:FLAGS],…).
set -e
image=$1
root=/mnt
mount --make-rslave /
mount -t tmpfs -o mode=755 image $root
show() { # SRC DST
	if [ -L "$1" ]; then
		cp -P "$1" "$root$2"
	elif [ -d "$1" ]; then
		mkdir -p "$root$2"
		mount --rbind "$1" "$root$2"
	else
		[ -e "$root$2" ] || { mkdir -p "$root${2%/*}" && touch "$root$2"; }
		mount --bind "$1" "$root$2"
	fi
}
for path in "$image"/*; do
	case ${path##*/} in
	proc | sys | dev | tmp | root | home) ;;
	*) show "$path" "/${path##*/}" ;;
	esac
done
for path in /proc /sys /dev; do show $path $path; done
mkdir -p -m 1777 $root/tmp
IFS=,
for mount in $2; do
	rest=${mount#*:}
	[ "$rest" != "$mount" ] || rest=$mount
	show "${mount%%:*}" "${rest%%:*}"
done
