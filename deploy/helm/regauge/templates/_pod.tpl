{{- /* A worker's pod: of the embedded engine, or of an engine's server. */ -}}
{{- define "regauge.pod" -}}
{{- $root := .root -}}{{- $pool := .pool -}}{{- $local := eq $pool.engine "local" -}}{{- $name := include "regauge.name" $root -}}
{{- $resources := deepCopy $pool.resources -}}
{{- range $root.Values.planes.compute -}}
{{- with .resource -}}
{{- $limits := get $resources "limits" | default dict -}}
{{- $_ := set $limits . (add1 (int (get $limits . | default 0)) | toString) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- end -}}
metadata:
  labels: {{- include "regauge.selector" (dict "root" $root "role" .role) | nindent 4 }}
  annotations:
    {{- if $local }}
    checksum/config: {{ .config | toJson | sha256sum }}
    {{- end }}
    {{- with include "regauge.networks" $root }}
    k8s.v1.cni.cncf.io/networks: {{ . }}
    {{- end }}
    kubectl.kubernetes.io/default-container: worker
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ $pool.graceSeconds }}
  {{- if $local }}
  securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
  {{- end }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $pool.image | default $root.Values.image | quote }}
      imagePullPolicy: {{ $root.Values.imagePullPolicy }}
      {{- if $local }}
      args: [worker, --role, {{ .role }}, --name, $(POD_NAME), --set, discovery.advertise=$(POD_IP), --config, /etc/regauge/config/worker.toml, --log-json]
      {{- else }}
      command: {{- toYaml $pool.command | nindent 8 }}
      {{- end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if and .leader (not $local) }}
      ports:
        - {name: http, containerPort: {{ $root.Values.ports.http }}}
        - {name: status, containerPort: {{ $root.Values.ports.status }}}
        {{- if eq .role "decode" }}
        - {name: control, containerPort: {{ $root.Values.ports.control }}}
        {{- end }}
      readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 3}
      startupProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, failureThreshold: 360}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        {{- /* The pool is pinned for RDMA. Binding to an interface needs NET_RAW before Linux 5.7. */}}
        capabilities: {drop: [ALL], add: [IPC_LOCK]}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- if $local }}
        - {name: config, mountPath: /etc/regauge/config, readOnly: true}
        - {name: state, mountPath: /var/lib/regauge}
        {{- end }}
        - {name: shm, mountPath: /dev/shm}
        {{- include "regauge.mounts" $root | nindent 8 }}
        {{- with $pool.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- if $local }}
    - name: config
      configMap: {name: {{ $name }}-{{ .role }}}
    - {name: state, emptyDir: {}}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory}
    {{- include "regauge.volumes" $root | nindent 4 }}
    {{- with $pool.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
