# Looks who could change what root is about to run, and only then runs it.
# sh -c "$(cat look.sh)" sh FILE-OR-DIRECTORY... -- PROGRAM WORD...
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
us=$(id -un)

for tool in namei awk find; do
	command -v "$tool" >/dev/null || {
		echo "nothing was run: $tool is not installed here; install it and try again" >&2
		exit 1
	}
done

refuse() {
	echo "$1 was not run: others than root can change it, or a directory or link on the way" >&2
	exit 1
}

# Each directory and link on the way to a path, and its target. A sticky directory keeps what is in
# it from others; what is not there has no owner.
way() {
	namei -m -o "$1" | awk -v us="$us" '
		$1 == "f:" || $1 == "?" { next }
		{ seen = 1 }
		$2 != "root" && $2 != us { bad = 1 }
		$1 ~ /^l/ || $1 ~ /^d.*[tT]$/ { next }
		$1 ~ /^.....w/ || $1 ~ /^........w/ { bad = 1 }
		END { exit bad || !seen }
	' || refuse "$1"
}

while [ "$1" != -- ]; do
	[ -e "$1" ] || { echo "$1 is not there" >&2; exit 1; }
	way "$1"
	other=$(find -L "$1" \( -path "$1/site-packages" -o -path "$1/dist-packages" \) -prune -o \
		! -type l \( ! -user root ! -user "$us" -o -perm -020 -o -perm -002 \) -print -quit) &&
		links=$(find "$1" \( -path "$1/site-packages" -o -path "$1/dist-packages" \) -prune -o \
			-type l -print) || {
		echo "nothing was run: $1 could not be looked at whole; see the error before" >&2
		exit 1
	}
	[ -z "$other" ] || refuse "$other"
	[ -z "$links" ] || echo "$links" | while read -r link; do way "$link"; done || exit 1
	shift
done
shift
exec "$@"
