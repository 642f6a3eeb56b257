# The tools are pinned here and built by Go itself: the first run of each takes a minute or two.
GOLANGCI_LINT := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := go run golang.org/x/vuln/cmd/govulncheck@v1.9.0

# The race detector needs a C compiler.
RACE := $(shell command -v cc >/dev/null 2>&1 && echo -race)

# go.work lists the modules, and nothing else does. The pattern "work" is the packages of all of them.
MODULES = $(shell go list -m -f '{{.Dir}}')

# make lint vets the code. Many tests wait, for a lock or a moment, and four of them at once fit on a server. A package
# that hangs ends after twenty minutes: a machine that is busy with other work needs several for the largest.
TEST := go test $(RACE) -vet=off -shuffle=on -count=1 -parallel 4 -timeout 20m

VERSIONS ?= 14 15 16 17 18
FUZZ     ?= 1000000x

.DEFAULT_GOAL := help
.PHONY: help demo quick test general torture fuzz test-matrix settings cover bench curve compare lint tidy fmt vuln

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Run the login example, on a Postgres that it finds or starts
	@go run ./examples/login

quick: ## Run the tests of the core but the heavy ones, on a Postgres that they find or start: about forty seconds
	go test -short -shuffle=on -count=1 -parallel 4 -skip 'ExactModel/Seed[1-9]' ./internal/bucket ./internal/batch ./internal/store ./ratelimit ./integration_test ./integration_test/bucket

test: ## Run every test, on a Postgres that they find or start
	@$(if $(RACE),,echo "Testing without the race detector, which needs a C compiler.")
	$(TEST) work

general: ## Run the tests of the core with the statements that decide by themselves switched off
	go test -tags generalpath -vet=off -shuffle=on -count=1 -parallel 4 -timeout 20m -skip '^TestInPartitions$$' ./integration_test

torture: ## Kill sessions, clients and servers under all calls, and check the accounts: ten minutes, or ARGS='-minutes 60 -seed 7'
	go test $(RACE) -vet=off -count=1 -v -timeout 24h -run '^TestTorture$$' ./integration_test/torture -args -minutes 10 $(ARGS)

fuzz: ## Give each fuzz target a million inputs, or FUZZ=10000x; ONLY=Key picks targets
	@.ci/fuzz '$(FUZZ)' '$(ONLY)'

test-matrix: ## Run every test on each of VERSIONS="14 15 16 17 18" of Postgres
	@for version in $(VERSIONS); do .ci/postgres $$version $(MAKE) --no-print-directory test || exit; done

settings: ## Run integration_test under settings of the database that somebody may have made: six runs, or SETTINGS="jit=on,jit_above_cost=0"
	@.ci/settings $(SETTINGS)

cover: ## Run every test and show which lines none of them reached (coverage.html)
	go test -coverprofile=coverage.out -coverpkg=work work
	go tool cover -html=coverage.out -o coverage.html
	@go tool cover -func=coverage.out | tail -n 1

# rueidis takes a minute to compile, the first time.
bench: ## Measure against peers, on servers it starts: some twenty minutes, or ARGS=-quick
	@cd bench && go run -tags rueidis . $(ARGS)

curve: ## Measure calls a second over the number of callers, and draw it: a quarter of an hour
	@cd bench && go run -tags rueidis . -run '^curve' -rounds 9 -seconds 0.5 -svg ../docs/images -json curves.json $(ARGS)

compare: ## Measure this checkout against an earlier commit, in turns: ARGS='-against HEAD~1'
	@cd bench && go run . -against HEAD -contenders '^$$' -rounds 7 -seconds 1 -run '^(take-1|take-16|take-64|take-512|hot-512|tx-1|five-1|five-16)$$' $(ARGS)

lint: ## Check the code, its layout, and each go.mod
	$(GOLANGCI_LINT) run $(addsuffix /...,$(MODULES))
	$(GOLANGCI_LINT) fmt --diff
	@for module in $(MODULES); do (cd "$$module" && echo "go mod tidy -diff in $$module" && go mod tidy -diff) || exit; done

tidy: ## Bring each go.mod in line with what the code imports
	@for module in $(MODULES); do (cd "$$module" && go mod tidy) || exit; done

fmt: ## Lay the code out as lint wants it
	$(GOLANGCI_LINT) fmt

vuln: ## Look for known vulnerabilities in what the code calls
	@for module in $(MODULES); do (cd "$$module" && echo "$$module" && $(GOVULNCHECK) ./...) || exit; done
