# Puts the files of a tar stream on standard input into a new directory, which appears in one step with all its
# contents. Needs ours.sh before it. Arguments: a directory that may be shared; the path of the new directory in it; its
# name until it is complete; seconds that all of it may take; the SHA-256 sums of the files. Works from within
# directories that have been checked, where no path can be redirected meanwhile.
# shellcheck shell=bash disable=SC2015
set -eu
sums=$5
as_told() { printf %s "$sums" | sha256sum --check --strict "$1"; }
refuse() { printf '%s\n' "$1" >&2; exit 1; }
mkdir -p -- "$1"
cd -- "$1"
umask 077
mode=$(stat -c %a .)
if [ "$((0$mode & 01002))" -eq 2 ]; then
    sample=$(made_here) && [ "$((0${sample#* } & 2))" -ne 0 ] ||
        refuse "$PWD: anybody can rename what is in it (mode $mode)"
fi
rest=$2
while [ "${rest#*/}" != "$rest" ]; do
    part=${rest%%/*} rest=${rest#*/}
    [ -e "./$part" ] || [ -L "./$part" ] || mkdir -m 700 -- "./$part" || [ -d "./$part" ]
    [ ! -L "./$part" ] || refuse "$PWD/$part: it is a link"
    cd -- "./$part"
    is_ours || refuse "$PWD: $(whose)"
done
# An earlier upload may have succeeded without the client learning of it.
if [ -d "./$rest" ] && [ ! -L "./$rest" ] && (
    cd -- "./$rest" && is_ours && [ ! -e .topoplan ] && as_told --status 2>/dev/null
); then exit; fi
[ ! -e "./$rest" ] && [ ! -L "./$rest" ] || refuse "$PWD/$rest: File exists"
mkdir -m 700 -- "./$3"
trap 'rm -rf -- "./$3"' EXIT
# A host that was cut off does not see the end of standard input; the time limit keeps it from finishing unasked.
(cd -- "./$3" && timeout "$4" tar -x -p -m --no-same-owner -f - && as_told --quiet)
[ "$SECONDS" -lt "$4" ]
mv -T -- "./$3" "./$rest"
