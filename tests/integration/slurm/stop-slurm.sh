#!/usr/bin/env bash
# Ends exactly the daemons that start-slurm.sh started (by recorded pid, after checking it is that daemon), after
# cancelling their jobs. MS_KEEP_NAMES=1 keeps /etc/hosts lines and the /etc/slurm/slurm.conf link. MS_PURGE=1 also
# removes the work dir, and the packages where start-slurm.sh installed them: with `srun` on the path, Lightning warns.
set -uo pipefail
W=${MS_DIR:-/tmp/mini-slurm}; export SLURM_CONF=$W/etc/slurm.conf
is_ours() { [[ "$(tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null)" == *"$2"*"$W"* ]]; }
ctl=$(cat "$W/run/slurmctld.pid" 2>/dev/null || true)
if [ -n "$ctl" ] && is_ours "$ctl" slurmctld; then
  ids=$(timeout 10 squeue -h -o %A | sort -un)
  if [ -n "$ids" ]; then
    timeout 10 scancel $ids; 
    for _ in $(seq 1 40); do [ -z "$(timeout 10 squeue -h -o %A)" ] && break; sleep 1; done
  fi
fi
end_one() { # pidfile, name: TERM, wait, KILL
  local p; p=$(cat "$1" 2>/dev/null) || return 0
  if [ -n "$p" ] && is_ours "$p" "$2"; then
    kill -TERM "$p"; for _ in $(seq 1 50); do is_ours "$p" "$2" || break; sleep 0.2; done
    is_ours "$p" "$2" && { echo "$2 pid $p did not end: KILL"; kill -KILL "$p"; }
    echo "ended $2 pid $p"
  fi
  rm -f "$1"
}
for f in "$W"/run/slurmd.*.pid; do [ -e "$f" ] && end_one "$f" slurmd; done
end_one "$W/run/slurmctld.pid" slurmctld
end_one "$W/run/munged.pid" munged
left=$(for c in /proc/[0-9]*/comm; do [ "$(cat "$c" 2>/dev/null)" = slurmstepd ] && echo "$c" | cut -d/ -f3; done)
[ -z "$left" ] || echo "slurmstepd still running (not ended by this script): $left"
if [ "${MS_KEEP_NAMES:-0}" != 1 ]; then
  grep -q '# mini-slurm$' /etc/hosts && { t=$(grep -v '# mini-slurm$' /etc/hosts); printf '%s\n' "$t" >/etc/hosts; }
  [ "$(readlink /etc/slurm/slurm.conf 2>/dev/null)" = "$W/etc/slurm.conf" ] && rm -f /etc/slurm/slurm.conf
  if [ "${MS_PURGE:-0}" = 1 ]; then
    [ ! -e "$W/installed" ] || apt-get purge -y -qq slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins >/dev/null 2>&1
    rm -rf "$W"
  fi
fi
exit 0
