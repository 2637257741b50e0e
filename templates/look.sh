# Looks who could change what root is about to run, and only then runs it.
# sh -c "$(cat look.sh)" sh FILE-OR-DIRECTORY... -- PROGRAM WORD...
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
us=$(id -un)

refuse() {
	echo "$1 was not run: others than root can change it, or a directory or link on the way" >&2
	exit 1
}

# Each directory and link on the way to a path, and its target. A sticky directory keeps what is in
# it from others; what is not there has no owner.
way() {
	namei -m -o "$1" | awk -v us="$us" '
		$1 == "f:" || $1 == "?" { next }
		$2 != "root" && $2 != us { exit 1 }
		$1 ~ /^l/ || $1 ~ /^d.*[tT]$/ { next }
		$1 ~ /^.....w/ || $1 ~ /^........w/ { exit 1 }
	' || refuse "$1"
}

while [ "$1" != -- ]; do
	[ -e "$1" ] || { echo "$1 is not there" >&2; exit 1; }
	way "$1"
	other=$(find -L "$1" \( -path "$1/site-packages" -o -path "$1/dist-packages" \) -prune -o \
		! -type l \( ! -user root ! -user "$us" -o -perm -020 -o -perm -002 \) -print | head -n 1)
	[ -z "$other" ] || refuse "$other"
	find "$1" \( -path "$1/site-packages" -o -path "$1/dist-packages" \) -prune -o -type l -print |
		while read -r link; do way "$link"; done || exit 1
	shift
done
shift
exec "$@"
