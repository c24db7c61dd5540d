#!/usr/bin/env bash
# A real SLURM cluster (slurmctld + N slurmd "nodes") on ONE machine, loopback only. Debian 12, root, no systemd.
# Each node is a slurmd in its own UTS namespace (own hostname) on its own port of 127.0.0.1, so no
# --enable-multiple-slurmd build is needed and `hostname` inside a job really says n1 / n2.
# Idempotent: run again to repair or after a reboot. Stop with stop-slurm.sh beside this file.
#   MS_DIR (work dir, /tmp/mini-slurm)  MS_NODES (2)  MS_CPUS per node (2; may exceed the real count)  MS_NICE (10)
#   MS_GRACE (seconds of GraceTime on the preemptible partition, 20)  MS_USRSIG=1: preemption sends the --signal signal
set -euo pipefail
W=${MS_DIR:-/tmp/mini-slurm}; N=${MS_NODES:-2}; CPUS=${MS_CPUS:-2}; NICE=${MS_NICE:-10}
GRACE=${MS_GRACE:-20}; USRSIG=${MS_USRSIG:-0}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TAG='# mini-slurm'
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 1; }

# 1. packages (policy-rc.d keeps the postinst scripts from starting the stock daemons)
if [ "$(command -v slurmctld slurmd munged sbatch srun | wc -l)" -lt 5 ]; then
  made=
  [ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; made=1; }
  nice apt-get update -qq || true
  DEBIAN_FRONTEND=noninteractive nice apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null || { [ -z "$made" ] || rm -f /usr/sbin/policy-rc.d; echo "SLURM cannot be installed"; exit 3; }
  mkdir -p "$W"; touch "$W/installed"
  [ -z "$made" ] || rm -f /usr/sbin/policy-rc.d
fi

# 2. names: every node is 127.0.0.1 with its own port. (Not 127.0.0.11, .12: replies to srun go to the source address
#    of its connection, which the kernel makes 127.0.0.1, while NoInAddrAny has srun listen on its hostname's address.)
mkdir -p "$W"/{etc,run,log,state,munge,spool,jobs}; chmod 755 "$W"; chmod 1777 "$W/jobs"
addhost() { grep -Eq "^$1[[:space:]]+$2([[:space:]]|\$)" /etc/hosts || echo "$1 $2 $TAG" >>/etc/hosts; }
addhost 127.0.0.1 ctl
for i in $(seq 1 "$N"); do addhost 127.0.0.1 "n$i"; done
getent hosts "$(hostname)" >/dev/null || echo "127.0.0.1 $(hostname) $TAG" >>/etc/hosts

# alive <pidfile> <exe name>: the recorded pid is really that daemon of this work dir
alive() { local p; p=$(cat "$1" 2>/dev/null) && [ -n "$p" ] && [[ "$(tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null)" == *"$2"*"$W"* ]]; }

# 3. slurm.conf
pp=; [ "$USRSIG" = 1 ] && pp='SlurmctldParameters=preempt_send_user_signal'
cat >"$W/etc/slurm.conf.new" <<CONF
ClusterName=mini
SlurmctldHost=ctl(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job must wait before it may start again (120 s by default)
AuthInfo=socket=$W/munge/munge.socket.2,cred_expire=10
# bind to the address of one's own hostname, never 0.0.0.0
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort=16817
SlurmctldPidFile=$W/run/slurmctld.pid
SlurmdPidFile=$W/run/slurmd.%n.pid
SlurmctldLogFile=$W/log/slurmctld.log
SlurmdLogFile=$W/log/slurmd.%n.log
SlurmdSpoolDir=$W/spool/%n
StateSaveLocation=$W/state
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$W/log/jobcomp.log
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=60
InactiveLimit=0
MinJobAge=3600
KillWait=10
OverTimeLimit=0
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5,bf_resolution=10
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$pp
$(for i in $(seq 1 "$N"); do echo "NodeName=n$i NodeHostname=n$i NodeAddr=127.0.0.1 Port=$((17000+i)) CPUs=$CPUS RealMemory=4000 State=UNKNOWN"; done)
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF
if [ -e "$W/etc/slurm.conf" ] && ! cmp -s "$W/etc/slurm.conf.new" "$W/etc/slurm.conf" && alive "$W/run/slurmctld.pid" slurmctld; then
  echo "configuration changed: restarting"; MS_DIR=$W MS_KEEP_NAMES=1 "$HERE/stop-slurm.sh"
fi
mv "$W/etc/slurm.conf.new" "$W/etc/slurm.conf"
# so that commands inside jobs (scontrol requeue) find it even without SLURM_CONF
mkdir -p /etc/slurm; [ -e /etc/slurm/slurm.conf ] || ln -sfn "$W/etc/slurm.conf" /etc/slurm/slurm.conf
export SLURM_CONF=$W/etc/slurm.conf
printf 'export SLURM_CONF=%s MS_DIR=%s\n' "$SLURM_CONF" "$W" >"$W/env.sh"

# 4. daemons
if ! alive "$W/run/munged.pid" munged; then
  [ -s "$W/munge/munge.key" ] || (umask 077; head -c 128 /dev/urandom >"$W/munge/munge.key")
  chmod 600 "$W/munge/munge.key"; rm -f "$W/munge/munge.socket.2"*
  nice -n "$NICE" munged --key-file="$W/munge/munge.key" --socket="$W/munge/munge.socket.2" --pid-file="$W/run/munged.pid" \
    --log-file="$W/log/munged.log" --seed-file="$W/munge/munged.seed" --num-threads=2
fi
alive "$W/run/slurmctld.pid" slurmctld || unshare -u sh -c "hostname ctl && exec nice -n $NICE slurmctld -f '$SLURM_CONF'"
for i in $(seq 1 "$N"); do
  alive "$W/run/slurmd.n$i.pid" slurmd || unshare -u sh -c "hostname n$i && exec nice -n $NICE slurmd -N n$i -f '$SLURM_CONF'"
done

# 5. wait until every node is usable
for t in $(seq 1 60); do
  up=$(sinfo -h -N -p low -o '%N %T' 2>/dev/null | grep -cE ' (idle|mixed|allocated)$' || true)
  [ "$up" = "$N" ] && break
  # a node left DOWN/DRAINED by an earlier run comes back by hand
  [ $((t % 10)) = 0 ] && scontrol update nodename="n[1-$N]" state=resume 2>/dev/null || true
  sleep 1
done
sinfo -N -l || true
[ "${up:-0}" = "$N" ] || { echo "FAILED: only ${up:-0} of $N nodes usable; logs in $W/log"; tail -5 "$W"/log/slurm*.log; exit 1; }
cat <<END
SLURM $(sinfo -V) is up: $N nodes, partitions low (preemptible, default) and high.
  use it:   . $W/env.sh; sbatch / srun / squeue / scontrol ...      logs: $W/log     job dir: $W/jobs
  stop it:  MS_DIR=$W $HERE/stop-slurm.sh
END
