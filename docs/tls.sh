#!/usr/bin/env bash
# Makes what a cluster needs that lets nobody else in: a token, a CA, and a certificate for each node.
#
#   bash docs/tls.sh FOLDER NAME...
#
# NAME is the address that a node is reached at, an IP address or a host's name. The first is the
# head; a machine that only runs the script that trains is a node, too. FOLDER/NAME is then all that
# the machine NAME needs: copy it there, over ssh, and source FOLDER/NAME/env before `ray start` and
# before Python. Called again with other names it adds nodes to the same cluster.
#
# Whoever has FOLDER/NAME can run code on every node. FOLDER/ca.key signs further nodes: keep it
# elsewhere. DAYS and PORT may be set in the environment.
set -euo pipefail
umask 077

if (($# < 2)); then
    echo "usage: bash tls.sh FOLDER HEAD [NODE...]" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
days=${DAYS:-365}
port=${PORT:-6379}

for name in "$@"; do
    if [[ ! $name =~ ^[A-Za-z0-9:]([A-Za-z0-9.:-]*[A-Za-z0-9])?$ ]]; then
        echo "$name: use an IP address or the name of a host" >&2
        exit 2
    fi
done

quiet() {
    local said
    said=$("$@" 2>&1) || {
        echo "$said" >&2
        exit 1
    }
}

# Secrets go from file to file, never through a command line, which every user can see.
if [[ ! -e $folder/token ]]; then
    openssl rand -hex 32 | tr -d '\n' >"$folder/token.new" # 256 bits, as Ray's own
    mv "$folder/token.new" "$folder/token"
fi
if [[ ! -e $folder/ca.crt ]]; then
    quiet openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$days" \
        -keyout "$folder/ca.key" -out "$folder/ca.crt" -subj "/CN=cluster CA" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign"
fi

for name in "$@"; do
    node=$folder/$name
    mkdir -p "$node"
    case $name in
    *:* | *[0-9].*[0-9].*[0-9].*[0-9]) kind=IP ;;
    *) kind=DNS ;;
    esac
    # Ray speaks to itself by these names, too.
    printf 'subjectAltName=%s:%s,DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' \
        "$kind" "$name" >"$node/node.ext"
    quiet openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
        -keyout "$node/node.key" -out "$node/node.csr" -subj "/CN=node"
    quiet openssl x509 -req -in "$node/node.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
        -CAcreateserial -days "$days" -extfile "$node/node.ext" -out "$node/node.crt"
    rm "$node/node.csr" "$node/node.ext"
    cp "$folder/ca.crt" "$folder/token" "$node/"
    cat >"$node/env" <<'EOF'
# Wherever this folder is, it says so itself.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
unset RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$here/token
export RAY_USE_TLS=1 RAY_TLS_CA_CERT=$here/ca.crt
export RAY_TLS_SERVER_CERT=$here/node.crt RAY_TLS_SERVER_KEY=$here/node.key
EOF
done

[[ -e $folder/head ]] || echo "$1" >"$folder/head"
head=$(<"$folder/head")
for name in "$@"; do
    echo "# on $name, with $folder/$name copied there as ~/cluster:"
    echo "source ~/cluster/env"
    if [[ $name == "$head" ]]; then
        echo "ray start --head --node-ip-address=$name --port=$port --include-dashboard=false"
    else
        echo "ray start --node-ip-address=$name --address=$head:$port"
    fi
done
echo "# where the script is started, the same environment, and then:"
echo "pl.Ray(workers=…, address=\"$head:$port\")"
