{{/* Pod template of one role: takes {root, role: head | worker, group: its values}. */}}
{{- define "replayssm.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $isHead := eq .role "head" -}}
metadata:
  labels:
    {{- include "replayssm.selectorLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- with .group.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .group.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "replayssm.serviceAccountName" .root }}
  {{- /* Only the autoscaler, beside the head, talks to Kubernetes. */}}
  automountServiceAccountToken: {{ and $isHead (not (empty $values.config.worker.autoscaling)) }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ add (include "replayssm.drainSeconds" .root) 30 }}
  {{- if not $isHead }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" }}
  {{- with get $.group $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
  - name: ray-{{ .role }}
    image: "{{ $values.image.repository }}:{{ default .root.Chart.AppVersion $values.image.tag }}"
    imagePullPolicy: {{ $values.image.pullPolicy }}
    securityContext:
      {{- toYaml $values.securityContext | nindent 6 }}
    ports:
      {{- include "replayssm.ports" . | nindent 6 }}
    env:
    - name: HF_HOME
      value: {{ $values.modelCache.mountPath }}
    {{- with $values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $values.envFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- include "replayssm.probes" . | nindent 4 }}
    lifecycle:
      preStop:
        exec:
          command: [python, -m, actors.drain, --timeout-s, {{ include "replayssm.drainSeconds" .root | quote }}]
    resources:
      {{- include "replayssm.resources" . | nindent 6 }}
    volumeMounts:
    - name: shared-mem
      mountPath: /dev/shm
    - name: models
      mountPath: {{ $values.modelCache.mountPath }}
    {{- if include "replayssm.authSecret" .root }}
    - name: auth
      mountPath: {{ include "replayssm.authDir" .root }}
      readOnly: true
    {{- end }}
    {{- with $values.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "replayssm.volumes" . | nindent 4 }}
{{- end -}}

{{- define "replayssm.ports" -}}
{{- if eq .role "head" -}}
- name: gcs-server
  containerPort: 6379
- name: dashboard
  containerPort: 8265
- name: client
  containerPort: 10001
{{ end -}}
- name: serve
  containerPort: {{ .root.Values.serve.port }}
- name: metrics
  containerPort: 8080
{{- with .root.Values.config.metrics.port }}
- name: exporter
  containerPort: {{ . }}
{{- end }}
{{- end -}}

{{- define "replayssm.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $node := dict "path" "/api/healthz" "port" 52365 -}}
{{- $proxy := dict "path" "/-/healthz" "port" "serve" -}}
startupProbe:
  httpGet: {{ toJson $node }}
  {{- toYaml $probes.startup | nindent 2 }}
livenessProbe:
  httpGet: {{ toJson $node }}
  {{- toYaml $probes.liveness | nindent 2 }}
readinessProbe:
  httpGet: {{ eq .role "head" | ternary $node $proxy | toJson }}
  {{- toYaml $probes.readiness | nindent 2 }}
{{- end -}}

{{/* Resources as given; on workers with the GPUs of one engine. */}}
{{- define "replayssm.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- $engine := .root.Values.config.engine -}}
{{- if and (eq .role "worker") (eq $engine.device "cuda") -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (dict $.group.gpuResource (int $engine.tp)) (default dict (get $resources $kind))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "replayssm.volumes" -}}
{{- $cache := .root.Values.modelCache -}}
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ .group.sharedMemory }}
- name: models
  {{- if eq $cache.type "hostPath" }}
  hostPath:
    path: {{ $cache.hostPath }}
    type: Directory
  {{- else if eq $cache.type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ include "replayssm.modelClaim" .root }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $cache.size }}
  {{- end }}
{{- with include "replayssm.authSecret" .root }}
- name: auth
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .root.Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
