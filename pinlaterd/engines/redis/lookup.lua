-- Whole jobs. Arguments: the shard, queue, the state they have to be in (or ''), whether with body
-- ('1'), then of each job priority and id. Returns OK, then for each a table of state, score, al,
-- ar, cs, ca, ra, ua, cd, bd; or 0 if there is no such job; or -1 if it was evicted.

local queue, wanted_state, with_body = take(), take(), take() == '1'
local states = { PENDING, IN_PROGRESS, SUCCEEDED, FAILED }
if wanted_state ~= '' then
  states = { wanted_state }
end
local found = { 'OK' }
while taken < #ARGV do
  local priority, id = take(), take()
  local state, score
  for _, each in ipairs(states) do
    score = score_in(set_key(queue, priority, each), id)
    if score then
      state = each
      break
    end
  end
  if not state then
    found[#found + 1] = 0
  else
    local f
    if with_body then
      f = job_fields(queue, id, 'al', 'ar', 'cs', 'ca', 'ra', 'ua', 'cd', 'bd')
    else
      f = job_fields(queue, id, 'al', 'ar', 'cs', 'ca', 'ra', 'ua', 'cd')
    end
    if not f then
      found[#found + 1] = -1
    else
      found[#found + 1] = { state, score, f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8] or false }
    end
  end
end
return found
