-- What a site's cli_filter.lua and job_submit.lua do for jobs of --robust (docs/plugin.md).
-- Written by `robust-admin install --plugin`; changes are lost at the next one. It is a module:
-- the site's own files load it, and no other job is touched.
local robust = {
	-- One spare node for every so many nodes that a job asks for; 0: none. Set it in the site's
	-- file: if has_robust then robust.nodes_per_spare = 32 end
	nodes_per_spare = 0,
}

local function mode_of(options)
	local plugins = options["spank"]
	local own = plugins and plugins["robust"]
	local mode = own and own["robust"]
	if mode == nil or mode == "unset" or mode == "off" then
		return nil
	end
	return mode == "observe" and "observe" or "full"
end

local function unset(value)
	return value == nil or value == "" or value == "unset" or value == "invalid-context"
end

-- The number in "4"; nil for a range, for "1k" and where nothing is asked for.
local function count_of(text)
	return tonumber(type(text) == "string" and text:match("^%d+$"))
end

-- The spare nodes that the job gets, and its nodes with them; nil: as it is.
local function spares_of(options)
	local per = robust.nodes_per_spare
	-- At the time of this call, "1-1" or "1" may also be what nobody asked for.
	local nodes = count_of(options["nodes"]) or count_of((options["nodes"] or ""):match("^(%d+)%-%1$"))
	if not per or per <= 0 or not nodes or nodes < 2 or not unset(options["export"]) then
		return nil
	end
	if not unset(options["ntasks"]) and count_of(options["ntasks"]) ~= 1 then
		return nil -- as many tasks on more nodes would be another layout
	end
	local spares = math.ceil(nodes / per)
	return spares, nodes + spares
end

-- For slurm_cli_pre_submit. Returns what it has done, in words; nil: the job is not --robust.
function robust.cli_pre_submit(options)
	local kind = options["type"]
	if (kind ~= "sbatch" and kind ~= "salloc") or mode_of(options) ~= "full" then
		return nil
	end
	local done = {}
	if options["no-kill"] ~= "set" then
		options["no-kill"] = "set"
		done[#done + 1] = "--no-kill"
	end
	if kind == "sbatch" then
		if unset(options["requeue"]) then -- a user's --no-requeue stays
			options["requeue"] = "set"
			done[#done + 1] = "--requeue"
		end
		if options["open-mode"] ~= "a" and options["open-mode"] ~= "append" then
			options["open-mode"] = "append"
			done[#done + 1] = "--open-mode=append"
		end
		local spares, nodes = spares_of(options)
		if spares then
			options["nodes"] = tostring(nodes)
			options["export"] = "ALL,ROBUST_SPARES=" .. spares
			done[#done + 1] = string.format("--nodes=%d (%d spare)", nodes, spares)
		end
	end
	if #done == 0 then
		return nil
	end
	return "--robust: this job also gets " .. table.concat(done, " ")
end

-- For slurm_job_submit, which also sees jobs that no command line of Slurm has submitted. Returns
-- the mode; nil: the job is not --robust.
function robust.job_submit(job_desc)
	local name = "_SLURM_SPANK_OPTION_robust_robust="
	local mode
	for _, word in pairs(job_desc.spank_job_env or {}) do
		local at = word:find(name, 1, true)
		if at then
			mode = word:sub(at + #name)
		end
	end
	if mode == nil or mode == "off" then
		return nil
	end
	if mode ~= "observe" then
		mode = "full"
		-- Not given is 65534 or nil, --no-requeue 0.
		if job_desc.requeue ~= 0 and job_desc.requeue ~= 1 then
			job_desc.requeue = 1
		end
	end
	-- With --export=ALL,NAME=VALUE, by which cli_pre_submit tells the spares, Slurm also asks the node
	-- for the user's login environment: a wait, and where it fails 26.05 holds the job.
	local env = job_desc.script and job_desc.environment
	if env and env["ROBUST_SPARES"] and env["SLURM_GET_USER_ENV"] == "1" then
		env["SLURM_GET_USER_ENV"] = "0"
	end
	if job_desc.admin_comment == nil or job_desc.admin_comment == "" then
		job_desc.admin_comment = "robust=" .. mode
	end
	return mode
end

return robust
