# What `.ci/run` and `.ci/full` share: the target folder, packages of the machine, features, and the clock.
# shellcheck shell=bash
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOME/.cache/fsdp-burn/target}
export CARGO_TERM_COLOR=never
# Incremental builds are off: nothing is compiled twice here.
export CARGO_INCREMENTAL=0

names=()
seconds=()

# Ends the stage before, and begins one: `stage NAME TEXT`.
stage() {
  end_stage
  current=$1
  began=$SECONDS
  printf '\n== %s: %s (%s)\n' "$1" "$2" "$(date +%T)"
}

end_stage() {
  if [ -n "${current:-}" ]; then
    names+=("$current")
    seconds+=($((SECONDS - began)))
    printf -- '-- %s: %d s\n' "$current" $((SECONDS - began))
    current=
  fi
}

# Ends the last stage, and prints the seconds of each and their sum.
finish() {
  end_stage
  printf '\n'
  local sum=0
  for at in "${!names[@]}"; do
    printf '%6d s  %s\n' "${seconds[$at]}" "${names[$at]}"
    sum=$((sum + seconds[at]))
  done
  printf '%6d s  sum\n' "$sum"
}

has_vulkan() { compgen -G "/usr/share/vulkan/icd.d/*.json" >/dev/null; }
has_mpi() { command -v mpicc >/dev/null && command -v mpirun >/dev/null; }

# Installs packages that a bare Debian machine lacks: a C compiler for the tokenizer's regular expressions, Open
# MPI with its headers, and libclang for the MPI bindings. With `all` also a Vulkan driver that needs no GPU,
# `strace`, and `ip` for network namespaces. A browser is installed where it can be.
install_packages() {
  local lacking=()
  command -v cc >/dev/null || lacking+=(build-essential)
  has_mpi || lacking+=(libopenmpi-dev openmpi-bin)
  compgen -G "/usr/lib/llvm-*/lib/libclang[.-][s0-9]*" >/dev/null || lacking+=(libclang-dev)
  if [ "${1:-}" = all ]; then
    has_vulkan || lacking+=(mesa-vulkan-drivers libvulkan1)
    command -v strace >/dev/null || lacking+=(strace)
    command -v ip >/dev/null || lacking+=(iproute2)
  fi
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 0
  if [ ${#lacking[@]} -gt 0 ]; then
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${lacking[@]}" >/dev/null
  fi
  if ! command -v chromium >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null || true
  fi
}

# Sets `features` to every feature that this machine can build.
find_features() {
  # The build of Burn's `cpu` and `cuda` features downloads an LLVM. Without a network, a script beside the
  # checkout installs Debian's in its place; DOWNLOADS=1 says that the download works.
  local llvm=${XDG_DATA_HOME:-$HOME/.local/share}/tracel
  if [ -x ../shared/tools/llvm-for-cubecl.sh ]; then ../shared/tools/llvm-for-cubecl.sh; fi
  features=flex
  if has_mpi; then
    features+=,mpi
  else
    echo "no Open MPI: the mpi engine is skipped"
  fi
  if [ "${DOWNLOADS:-0}" = 1 ] || compgen -G "$llvm/tracel-llvm-*" >/dev/null; then
    features+=,cpu,wgpu,cuda,fusion
  else
    echo "no LLVM for CubeCL: its devices and the nccl engine are skipped"
  fi
}
