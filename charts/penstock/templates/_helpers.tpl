{{- /* Labels of an object: (dict "root" $ "component" "gateway"). Selectors use the first alone, so that they never change. */ -}}
{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock-{{ .component }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock-{{ .component }}
{{- end }}

{{- define "penstock.podLabels" -}}
app.kubernetes.io/name: penstock-{{ .component }}
app.kubernetes.io/part-of: penstock
{{- with .values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* A reference: (dict "root" $ "image" .Values.operator.image). A digest goes before a tag. */ -}}
{{- define "penstock.image" -}}
{{- $registry := .root.Values.image.registry | trimSuffix "/" -}}
{{- if $registry }}{{ $registry }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}
{{- else }}:{{ .image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "penstock.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- if $account.create }}{{ $account.name | default (printf "penstock-%s" .component) }}{{ else }}{{ $account.name | default "default" }}{{ end -}}
{{- end }}

{{- /* What the pods of all components have in common: (dict "root" $ "component" "gateway" "values" .Values.gateway). */ -}}
{{- define "penstock.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- with .values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "penstock.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{- define "penstock.container" -}}
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* Environment variables from the pod itself: (list "NAME" "field.path" …). */ -}}
{{- define "penstock.fieldEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    fieldRef:
      fieldPath: {{ index . 1 }}
{{- end }}

{{- define "penstock.podDisruptionBudget" -}}
{{- if .values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: penstock-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{- /* The text, with the runbooks where they are read. */ -}}
{{- define "penstock.runbooks" -}}
{{- $url := .root.Values.monitoring.runbookUrl | trimSuffix "/" | default "docs/runbooks" -}}
{{- .text | trimSuffix "\n" | replace "docs/runbooks/" (printf "%s/" $url) -}}
{{- end }}
