exec 2>&1
try() {
    echo "\$ $*"
    "$@"
    echo "exit $?"
}
try sluice info
try sluice info one two
try sluice info absent.gguf
try sluice info .
printf 'GGUF\003\000\000\000' >short.gguf
try sluice info short.gguf
printf 'this is a text' >text.gguf
try sluice info text.gguf --json
cd "$FIXTURES/gguf" || exit 1
try sluice info big_endian.gguf
try sluice info split-00002-of-00003.gguf
