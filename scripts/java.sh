#!/usr/bin/env bash
# Finds a Java that Spark can run on and prints its JAVA_HOME; everything else goes to stderr.
# Looks at JAVA_HOME, the PATH, /usr/lib/jvm; as root on Debian or Ubuntu it installs one if there is none.
set -euo pipefail

readonly MINIMUM=17

# The major version of the java in home $1 (8 for "1.8.0"), or nothing if it does not run.
major_of() {
    local text version
    [[ -x "$1/bin/java" ]] || return 0
    text="$("$1/bin/java" -version 2>&1)" || return 0
    [[ "$text" =~ version\ \"([0-9]+)(\.([0-9]+))? ]] || return 0
    version="${BASH_REMATCH[1]}"
    [[ "$version" != 1 ]] || version="${BASH_REMATCH[3]:-1}"
    echo "$version"
}

# Prints the first home that is new enough. A JAVA_HOME that is too old is passed over, not obeyed.
find_java() {
    local home major on_path
    local -a homes=()
    [[ -z "${JAVA_HOME:-}" ]] || homes+=("$JAVA_HOME")
    if on_path="$(command -v java)"; then
        on_path="$(readlink -f "$on_path")"
        homes+=("${on_path%/bin/java}")
    fi
    homes+=(/usr/lib/jvm/*)
    for home in "${homes[@]}"; do
        major="$(major_of "$home")"
        if [[ -n "$major" && "$major" -ge "$MINIMUM" ]]; then
            echo "$home"
            return 0
        fi
    done
    return 1
}

# The packages worth trying, best first: 17, the distribution's default, then any newer release.
candidates() {
    echo "openjdk-$MINIMUM-jre-headless"
    echo default-jre-headless
    apt-cache pkgnames openjdk- 2>/dev/null |
        sed -n 's/^openjdk-\([0-9][0-9]*\)-jre-headless$/\1/p' | sort -n |
        while read -r release; do
            if (( release > MINIMUM )); then echo "openjdk-$release-jre-headless"; fi
        done
}

install_java() {
    local package
    echo "No Java $MINIMUM or newer found; installing one with apt-get." >&2
    apt-get update >&2 || echo "apt-get update failed; trying with the package lists at hand." >&2
    for package in $(candidates); do
        if DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package" >&2 &&
            find_java; then
            return 0
        fi
    done
    return 1
}

find_java && exit 0
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    install_java && exit 0
fi
cat >&2 <<MESSAGE
Holdfast needs Java $MINIMUM or newer, and none was found in JAVA_HOME, on the PATH or in /usr/lib/jvm.
On Debian or Ubuntu run:  sudo apt-get update && sudo apt-get install -y openjdk-$MINIMUM-jre-headless
Elsewhere install any JDK or JRE from $MINIMUM on and set JAVA_HOME to its directory.
MESSAGE
exit 1
