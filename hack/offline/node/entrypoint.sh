#!/bin/bash
# The init process of a node instead of systemd: runs containerd and the kubelet, and restarts them.
set -u

mount --make-rshared /

# kind waits for this line.
echo "detected cgroup v1"

# kind sets cgroupRoot to /kubelet: the group must exist in every controller, and an empty cpuset is unusable.
for controller in /sys/fs/cgroup/*/; do
    group="${controller}kubelet"
    mkdir -p "$group" 2>/dev/null || continue
    for file in cpuset.cpus cpuset.mems; do
        if [ -e "${controller}${file}" ]; then
            cat "${controller}${file}" >"${group}/${file}"
        fi
    done
done

mkdir -p /var/log /etc/cni/net.d /run/containerd

(
    while true; do
        containerd >>/var/log/containerd.log 2>&1
        sleep 1
    done
) &

until ctr version >/dev/null 2>&1; do
    sleep 0.2
done

# /var is a new volume in every node, so the images are imported before the kubelet needs them.
for archive in /kind/images/*.tar; do
    ctr --namespace k8s.io images import "$archive" >>/var/log/images.log 2>&1
done

(
    while true; do
        if [ -f /var/lib/kubelet/config.yaml ]; then
            KUBELET_KUBEADM_ARGS=""
            if [ -f /var/lib/kubelet/kubeadm-flags.env ]; then
                . /var/lib/kubelet/kubeadm-flags.env
            fi
            # Unquoted on purpose: the variable holds several flags.
            kubelet \
                --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
                --kubeconfig=/etc/kubernetes/kubelet.conf \
                --config=/var/lib/kubelet/config.yaml \
                --container-runtime=remote \
                --container-runtime-endpoint=unix:///run/containerd/containerd.sock \
                $KUBELET_KUBEADM_ARGS >>/var/log/kubelet.log 2>&1
        fi
        sleep 0.5
    done
) &

wait
