# Images for a registry: `make images REGISTRY=registry.example.com/team [GPU=1] [PUSH=1]`, or directly
#
#     REGISTRY=… VERSION=$(cat VERSION) docker buildx bake --push all

variable "REGISTRY" {
  default = ""
}

variable "VERSION" {
  default = "dev"
}

variable "REVISION" {
  default = "unknown"
}

function "image" {
  params = [name, suffix]
  result = REGISTRY == "" ? "${name}:${VERSION}${suffix}" : "${REGISTRY}/${name}:${VERSION}${suffix}"
}

group "default" {
  targets = ["operator", "router", "engine-cpu"]
}

group "all" {
  targets = ["operator", "router", "engine-cpu", "engine-cuda"]
}

target "common" {
  context = "."
  args = {
    VERSION  = VERSION
    REVISION = REVISION
  }
}

target "operator" {
  inherits   = ["common"]
  dockerfile = "images/operator/Dockerfile"
  tags       = [image("trimtab-operator", "")]
}

target "router" {
  inherits   = ["common"]
  dockerfile = "images/router/Dockerfile"
  tags       = [image("trimtab-router", "")]
}

target "engine-cpu" {
  inherits   = ["common"]
  dockerfile = "images/engine-cpu/Dockerfile"
  tags       = [image("trimtab-engine", "-cpu")]
}

# Without a suffix: the chart's default image. It also runs on CPUs.
target "engine-cuda" {
  inherits   = ["common"]
  dockerfile = "images/engine-cuda/Dockerfile"
  tags       = [image("trimtab-engine", "")]
}
