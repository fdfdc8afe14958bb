{{- define "trimtab.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters, so that names with suffixes have at most 63. */}}
{{- define "trimtab.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "trimtab.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "trimtab.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Names of cluster-scoped objects include the namespace, so that releases with the same name do not collide. */}}
{{- define "trimtab.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "trimtab.fullname" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "trimtab.serviceAccountName" -}}
{{- if (.Values.serviceAccount).create -}}
{{- default (include "trimtab.fullname" .) (.Values.serviceAccount).name -}}
{{- else -}}
{{- default "default" (.Values.serviceAccount).name -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.webhookName" -}}{{ include "trimtab.fullname" . }}-webhook{{- end -}}
{{- define "trimtab.leaseName" -}}{{ include "trimtab.fullname" . }}-operator{{- end -}}
{{- define "trimtab.secretName" -}}{{ include "trimtab.fullname" . }}-operator{{- end -}}

{{/* Versions may have build metadata (1.0.0+abc), which labels cannot contain. */}}
{{- define "trimtab.labelValue" -}}
{{- . | replace "+" "_" | trunc 63 | trimAll "-_." -}}
{{- end -}}

{{- define "trimtab.selectorLabels" -}}
app.kubernetes.io/name: {{ include "trimtab.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "trimtab.labels" -}}
{{ include "trimtab.selectorLabels" . }}
app.kubernetes.io/part-of: trimtab
app.kubernetes.io/version: {{ include "trimtab.labelValue" .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "trimtab.labelValue" (printf "%s-%s" .Chart.Name .Chart.Version) }}
{{- end -}}

{{/* The operator's pods, as a NetworkPolicyPeer. A policy cannot select pods in the host's network. */}}
{{- define "trimtab.operatorPeer" -}}
{{- if (.Values.networkPolicy).operator -}}
{{- toJson (.Values.networkPolicy).operator -}}
{{- else -}}
{{- if .Values.hostNetwork -}}
{{- fail "networkPolicy.operator: is empty, but NetworkPolicies cannot select pods with hostNetwork; set it to an ipBlock of the nodes, or set networkPolicy.enabled to false" -}}
{{- end -}}
{{- $labels := include "trimtab.selectorLabels" . | fromYaml -}}
{{- $namespace := dict "kubernetes.io/metadata.name" .Release.Namespace -}}
{{- dict "namespaceSelector" (dict "matchLabels" $namespace) "podSelector" (dict "matchLabels" $labels) | toJson -}}
{{- end -}}
{{- end -}}

{{/* Helm passes a tag with only digits as a number. */}}
{{- define "trimtab.tag" -}}
{{- $tag := default (index . 1) (index . 0) -}}
{{- if kindIs "float64" $tag }}{{ int64 $tag }}{{ else }}{{ $tag }}{{ end -}}
{{- end -}}

{{- define "trimtab.image" -}}
{{ (.Values.image).repository }}:{{ include "trimtab.tag" (list (.Values.image).tag .Chart.AppVersion) }}
{{- end -}}

{{- define "trimtab.engineImage" -}}
{{ ((.Values.engine).image).repository }}:{{ include "trimtab.tag" (list ((.Values.engine).image).tag .Chart.AppVersion) }}
{{- end -}}

{{- define "trimtab.routerImage" -}}
{{ ((.Values.router).image).repository }}:{{ include "trimtab.tag" (list ((.Values.router).image).tag .Chart.AppVersion) }}
{{- end -}}

{{/* The role that routers' accounts are bound to: the operator can only grant permissions that it has itself. */}}
{{- define "trimtab.routerRole" -}}
{{- $kind := ternary "Role" "ClusterRole" (not (empty .Values.watchNamespaces)) -}}
{{- dict "kind" $kind "name" (printf "%s-router" (include "trimtab.clusterName" . | trunc 56 | trimSuffix "-")) | toJson -}}
{{- end -}}

{{- define "trimtab.routerRules" -}}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end -}}

{{/* Permissions in managed namespaces. Everything listed is also watched, since reconciles read from a cache. */}}
{{- define "trimtab.workloadRules" -}}
- apiGroups: [trimtab.dev]
  resources: [inferencedeployments] # never written: spec and metadata belong to the resource's owner
  verbs: [get, list, watch]
- apiGroups: [trimtab.dev]
  resources: [inferencedeployments/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
# The Secret with which the pods of multi-pod replicas authenticate each other, one in each namespace. A server-side
# apply that creates it is authorized by its name.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [trimtab-rendezvous]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
# Serving replicas are evicted, so that PodDisruptionBudgets apply.
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch{{ if (.Values.router).enabled }}, delete{{ end }}]
{{- if (.Values.router).enabled }}
# Routers: their pods, and the permission to find the engines, which the operator itself does not use.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
{{ include "trimtab.routerRules" . }}
{{- end }}
# If the cluster serves them; objects disabled by the administrator are deleted.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch{{ if (.Values.router).enabled }}, delete{{ end }}]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end -}}

{{/* The operator's Prometheus flags, one per line; empty without a URL. */}}
{{- define "trimtab.prometheusArgs" -}}
{{- with .Values.prometheus }}
{{- if .url }}
- {{ printf "--prometheus-url=%s" .url | quote }}
- --prometheus-scrape-seconds={{ .scrapeSeconds }}
- --prometheus-pod-label={{ .podLabel }}
- --prometheus-namespace-label={{ .namespaceLabel }}
{{- range $name, $value := .match }}
- {{ printf "--prometheus-match=%s=%s" $name $value | quote }}
{{- end }}
{{- range $ours, $theirs := .aliases }}
- {{ printf "--prometheus-alias=%s=%s" $ours $theirs | quote }}
{{- end }}
{{- if .caConfigMap.name }}
- --prometheus-ca-file=/etc/trimtab/prometheus/ca.crt
{{- end }}
{{- if .tokenSecret.name }}
- --prometheus-token-file=/etc/trimtab/prometheus/token
{{- else if .serviceAccountToken }}
- --prometheus-token-file=/var/run/secrets/kubernetes.io/serviceaccount/token
{{- end }}
{{- if .username }}
- {{ printf "--prometheus-username=%s" .username | quote }}
- --prometheus-password-file=/etc/trimtab/prometheus/password
{{- end }}
{{- if .insecure }}
- --prometheus-insecure
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The volume sources of the files that these flags reference; empty if they reference none. */}}
{{- define "trimtab.prometheusFiles" -}}
{{- with .Values.prometheus }}
{{- if and .url .caConfigMap.name }}
- configMap:
    name: {{ .caConfigMap.name }}
    items: [{key: {{ .caConfigMap.key }}, path: ca.crt}]
{{- end }}
{{- if and .url .tokenSecret.name }}
- secret:
    name: {{ .tokenSecret.name }}
    items: [{key: {{ .tokenSecret.key }}, path: token}]
{{- end }}
{{- if and .url .username }}
- secret:
    name: {{ required "prometheus.passwordSecret.name: required with prometheus.username" .passwordSecret.name }}
    items: [{key: {{ .passwordSecret.key }}, path: password}]
{{- end }}
{{- end }}
{{- end }}
