{{- define "regauge.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "regauge.labels" -}}
app.kubernetes.io/name: regauge
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "regauge.selector" -}}
app.kubernetes.io/name: regauge
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- /* Names of the networks of a pod, as Multus reads them; the i-th is its interface net(i+1). */ -}}
{{- define "regauge.networks" -}}
{{- $names := list -}}
{{- range .Values.planes.compute -}}
{{- $names = append $names (.existing | default (printf "%s/%s-%s" $.Release.Namespace (include "regauge.name" $) .name)) -}}
{{- end -}}
{{- join "," $names -}}
{{- end }}

{{- /* The interfaces of the compute plane in a worker's pod. */ -}}
{{- define "regauge.nics" -}}
{{- $nics := list -}}
{{- range $i, $_ := .Values.planes.compute -}}{{- $nics = append $nics (printf "net%d" (add1 $i)) -}}{{- end -}}
{{- $nics | toJson -}}
{{- end }}

{{- /* [transfer], as a dictionary: control stays on the pods' own network, where the gateway tells of it. */ -}}
{{- define "regauge.transfer" -}}
{{- $nics := include "regauge.nics" . | fromJsonArray -}}
{{- $t := dict "transport" .Values.transfer.transport "key_file" "/etc/regauge/key/key" "host" (first (append $nics "eth0")) "control" "eth0" -}}
{{- if gt (len $nics) 1 -}}{{- $_ := set $t "nics" $nics -}}{{- end -}}
{{- if .Values.tlsSecret -}}
{{- $_ := set $t "tls" (dict "certificate" "/etc/regauge/tls/tls.crt" "key" "/etc/regauge/tls/tls.key" "authority" "/etc/regauge/tls/ca.crt") -}}
{{- end -}}
{{- mustMergeOverwrite $t (deepCopy .Values.transfer.extra) | toJson -}}
{{- end }}

{{- define "regauge.mounts" -}}
- {name: key, mountPath: /etc/regauge/key, readOnly: true}
{{- if .Values.tlsSecret }}
- {name: tls, mountPath: /etc/regauge/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "regauge.volumes" -}}
- name: key
  secret: {secretName: {{ .Values.keySecret | quote }}, defaultMode: 288}
{{- if .Values.tlsSecret }}
- name: tls
  secret: {secretName: {{ .Values.tlsSecret | quote }}, defaultMode: 288}
{{- end }}
{{- end }}

{{- define "regauge.checks" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $.Values $role -}}
{{- if and (eq $pool.engine "local") (gt (int $pool.size) 1) -}}{{- fail (printf "%s.size: the embedded engine runs on one host: 1" $role) -}}{{- end -}}
{{- if and (eq $pool.engine "local") $pool.command -}}{{- fail (printf "%s.command: is an engine's; %s.engine is local" $role $role) -}}{{- end -}}
{{- if and (ne $pool.engine "local") (not $pool.command) -}}{{- fail (printf "%s.command: say how %s is started" $role $pool.engine) -}}{{- end -}}
{{- if and (ne $pool.engine "local") (not $pool.image) -}}{{- fail (printf "%s.image: name an image that has %s and regauge" $role $pool.engine) -}}{{- end -}}
{{- end -}}
{{- range $i, $net := .Values.planes.compute -}}
{{- if not (or $net.existing $net.config) -}}{{- fail (printf "planes.compute[%d] (%s): give existing, or config" $i $net.name) -}}{{- end -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.planes.management -}}
{{- fail "podMonitor.enabled: with planes.management metrics answer on that network alone, where a PodMonitor does not reach" -}}
{{- end -}}
{{- if and (gt (int .Values.gateway.replicas) 1) (or (eq .Values.prefill.engine "local") (eq .Values.decode.engine "local")) -}}
{{- fail "gateway.replicas: workers of the embedded engine register at one gateway; use gateway.processes, or 1" -}}
{{- end -}}
{{- end }}

{{- /* A value as TOML, in one line. Numbers by toJson: Helm reads 8192 as a float, and toToml writes 8192.0. */ -}}
{{- define "regauge.value" -}}
{{- if kindIs "map" . -}}
{{- $parts := list -}}
{{- range $key, $value := . -}}{{- $parts = append $parts (printf "%s = %s" ($key | toJson) (include "regauge.value" $value)) -}}{{- end -}}
{ {{- join ", " $parts -}} }
{{- else if kindIs "slice" . -}}
{{- $parts := list -}}
{{- range . -}}{{- $parts = append $parts (include "regauge.value" .) -}}{{- end -}}
[{{- join ", " $parts -}}]
{{- else -}}
{{- . | toJson -}}
{{- end -}}
{{- end }}

{{- /* A dictionary as a TOML file. */ -}}
{{- define "regauge.toml" -}}
{{- range $key, $value := . }}{{ if not (kindIs "map" $value) }}
{{ $key }} = {{ include "regauge.value" $value }}
{{- end }}{{ end }}
{{- range $table, $values := . }}{{ if kindIs "map" $values }}

[{{ $table }}]
{{- range $key, $value := $values }}
{{ $key }} = {{ include "regauge.value" $value }}
{{- end }}
{{- end }}{{ end }}
{{- end }}
